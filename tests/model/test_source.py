import json
from pathlib import Path
from shutil import copytree

import pytest
import torch
from safetensors.torch import load_file, save_file

from nvium_core import CheckpointError, NviumForCausalLM, load_model
from nvium_core.model.checkpoint import read_config
from nvium_core.model.source import describe_exits, digest_of, write_exits
from nvium_core.training.retrofitting.retrofit import with_exits
from tests.byte_model import wrapped_tokenizer
from tests.model.llama_folders import llama_folder, random_llama
from tests.model.looped_folders import ouro_folder

SHAPE = {"vocab_size": 257, "num_hidden_layers": 4, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
"""Of the byte tokenizer."""

IDS = torch.tensor([[1, 5, 9, 200]])


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = llama_folder(tmp_path / "base", random_llama(**SHAPE))
    wrapped_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def exits(base: Path, tmp_path: Path) -> Path:
    """Random exits after layers 1 and 3."""
    model = NviumForCausalLM(with_exits(read_config(base), [1, 3, 4], 16))
    early = {name: weight for name, weight in model.state_dict().items() if name.startswith(("exits.0", "exits.1"))}
    original = NviumForCausalLM.from_pretrained(base)
    (folder := tmp_path / "exits").mkdir()
    write_exits(early, describe_exits(model.config, "base", digest_of(original.state_dict(), original.config)), folder)
    return folder


@torch.no_grad()
def test_the_last_exit_is_the_base(base, exits):
    original, model = NviumForCausalLM.from_pretrained(base), NviumForCausalLM.from_pretrained(base, exits=exits)
    assert (model.config.exit_layers, model.config.default_sampling) == ([1, 3, 4], "original")
    logits = model(IDS, output_exit_logits=True).exit_logits
    assert torch.equal(logits[..., -1, :], original(IDS, output_exit_logits=True).exit_logits[..., -1, :])
    assert not torch.equal(logits[..., 0, :], logits[..., -1, :])


def test_generate_runs_base_and_exits_and_convert_merges_them(nvium, base, exits, tmp_path):
    nvium("generate", base, "--exits", exits, "--prompt", "a", "--max-tokens", 3, "--seed", 1)
    merged = tmp_path / "merged"
    nvium("convert", base, merged, "--exits", exits)
    one, other = NviumForCausalLM.from_pretrained(merged), NviumForCausalLM.from_pretrained(base, exits=exits)
    assert one.config.exit_layers == [1, 3, 4] and one.config.default_sampling == "original"
    assert all(torch.equal(weight, other.state_dict()[name]) for name, weight in one.state_dict().items())
    loaded = load_model(str(base), "cpu", exits=str(exits))
    assert loaded.name == "base" and loaded.model.config.num_exits == 3


def test_the_digest_does_not_depend_on_the_precision(base):
    narrow, wide = (NviumForCausalLM.from_pretrained(base, dtype=dtype) for dtype in (torch.bfloat16, torch.float64))
    assert digest_of(narrow.state_dict(), narrow.config) == digest_of(wide.state_dict(), wide.config)


def test_exits_of_another_model_are_rejected(base, exits, tmp_path):
    tuned = llama_folder(tmp_path / "tuned", random_llama(**SHAPE, seed=1))
    with pytest.raises(CheckpointError, match=r"exits were made for base, but .*tuned has different weights"):
        NviumForCausalLM.from_pretrained(tuned, exits=exits)
    deeper = llama_folder(tmp_path / "deeper", random_llama(**SHAPE | {"num_hidden_layers": 5}))
    with pytest.raises(CheckpointError, match=r"made for base with num_hidden_layers 4, but .*deeper has 5"):
        NviumForCausalLM.from_pretrained(deeper, exits=exits)
    with pytest.raises(CheckpointError, match="looped is a looped model, which cannot be retrofitted"):
        NviumForCausalLM.from_pretrained(ouro_folder(tmp_path / "looped"), exits=exits)
    NviumForCausalLM.from_pretrained(base, exits=exits).save_pretrained(tmp_path / "whole")
    with pytest.raises(CheckpointError, match="whole already has exits"):
        NviumForCausalLM.from_pretrained(tmp_path / "whole", exits=exits)


def test_damaged_exits_are_rejected(base, exits, tmp_path):
    def damaged(content: str, file: str = "exits.json") -> Path:
        copytree(exits, place := tmp_path / f"damaged-{len(list(tmp_path.iterdir()))}")
        (place / file).write_text(content, encoding="utf-8")
        return place

    about = json.loads((exits / "exits.json").read_text())
    places = {
        "not valid JSON": damaged("{"),
        "must be a JSON object": damaged("[]"),
        "exits.json: .*exit_layers": damaged(json.dumps(about | {"exit_layers": [3, 1, 4]})),
        "unexpected tensor exits.1": damaged(json.dumps(about | {"exit_layers": [3, 4]})),
        "exits.json: adapter_hidden_size is 16777216, but": damaged(json.dumps(about | {"adapter_hidden_size": 2**24})),
        "exits.safetensors: ": damaged("", "exits.safetensors"),
        "exits: .*no such folder": tmp_path / "nowhere",
    }
    lacking = places["damaged-[0-9]+: missing tensor exits.0.router"] = damaged("{}", "README.md")
    tensors = load_file(lacking / "exits.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if "router.fc1" not in name}
    save_file(kept, lacking / "exits.safetensors", metadata={"format": "pt"})
    for reason, place in places.items():
        with pytest.raises(CheckpointError, match=reason):
            NviumForCausalLM.from_pretrained(base, exits=place)
