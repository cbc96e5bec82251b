import json
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from nvium_core import CheckpointError, NviumForCausalLM
from nvium_core.model.checkpoint import MAX_TENSORS
from nvium_core.model.nvium import Nvium
from tests.model.llama_folders import edit_tensors, llama_folder, random_llama
from tests.random_models import random_model

SAME: dict[str, torch.dtype] = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    random_model([2, 3], dtype=torch.float32).save_pretrained(tmp_path)
    return tmp_path


def assert_same_weights(one: Nvium, other: Nvium) -> None:
    ours, theirs = one.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype and torch.equal(tensor, theirs[name]), name


@pytest.mark.parametrize("dtype", SAME)
@pytest.mark.parametrize("is_tied", [False, True])
def test_a_saved_model_comes_back_bit_for_bit(is_tied, dtype, tmp_path):
    model = random_model([1, 2, 4], dtype=SAME[dtype], tie_word_embeddings=is_tied)
    model.save_pretrained(tmp_path)
    again = NviumForCausalLM.from_pretrained(tmp_path)
    assert_same_weights(model, again)
    assert again.config.exit_layers == [1, 2, 4]
    assert (again.lm_head.weight is again.model.embed_tokens.weight) == is_tied


def test_a_folder_of_several_precisions_is_loaded_in_that_of_the_first_stored_tensor(folder):
    """safetensors stores the widest numbers first."""
    edit_tensors(folder, lambda tensors: tensors.update({k: t.bfloat16() for k, t in tensors.items() if t.dim() > 1}))
    assert Nvium.from_pretrained(folder, dtype="auto").dtype == torch.float32


@pytest.mark.parametrize("tied", [False, True])
def test_the_served_model_equals_the_hugging_face_model(tied, tmp_path):
    theirs = random_llama(tie_word_embeddings=tied)
    folder = llama_folder(tmp_path, theirs)
    (folder / "generation_config.json").write_text('{"eos_token_id": [3, 5]}', encoding="utf-8")
    served, hugging_face = (kind.from_pretrained(folder, dtype=torch.float32) for kind in (Nvium, NviumForCausalLM))
    assert_same_weights(served, hugging_face)
    assert served.num_parameters() == hugging_face.num_parameters() == theirs.num_parameters()
    assert served.generation_config.eos_token_id == hugging_face.generation_config.eos_token_id == [3, 5]
    ids = torch.arange(24).view(2, 12)
    ours, expected = served(ids, labels=ids), hugging_face(ids, labels=ids)
    assert torch.equal(ours.logits, expected.logits) and torch.equal(ours.loss, expected.loss)


def test_a_model_is_loaded_in_the_requested_precision(folder):
    assert NviumForCausalLM.from_pretrained(folder, dtype=torch.float64).dtype == torch.float64
    assert NviumForCausalLM.from_pretrained(folder, torch_dtype=torch.float64).dtype == torch.float64
    assert AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).dtype == torch.bfloat16


def test_missing_unexpected_and_misshapen_tensors_are_rejected_by_name(folder):
    changes: dict[str, Tensor | None] = {
        "exits.0.router.fc2.bias": None,
        "exits.1.router.head.bias": torch.zeros(2),
        "lm_head.weight": torch.zeros(18, 16),
        "early_lm_heads.0.weight": torch.ones(17, 16),
        "model.rotary_emb.scale": torch.ones(17, 16),
        "lm_head.bias": torch.ones(17),
    }
    whole = load_file(folder / "model.safetensors")
    for name, tensor in changes.items():
        changed = {key: value for key, value in (whole | {name: tensor}).items() if value is not None}
        save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(CheckpointError, match=re.escape(name)):
            NviumForCausalLM.from_pretrained(folder)


def test_stored_rotary_tables_are_ignored(tmp_path):
    folder = llama_folder(tmp_path, random_llama())
    without = NviumForCausalLM.from_pretrained(folder)
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_tensors(folder, lambda tensors: tensors.update({name: torch.zeros(4)}))
    assert_same_weights(NviumForCausalLM.from_pretrained(folder), without)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"weight_map": ["a"]}', '{"weight_map": {"a": [1]}}']
    + [f'{{"weight_map": {{"a": {name}}}}}' for name in ("3", "null", '""', '"../model.safetensors"', '"/etc/passwd"')],
)
def test_a_damaged_shard_index_is_rejected_naming_the_file(folder, text):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json"):
        NviumForCausalLM.from_pretrained(folder)


@pytest.fixture
def sharded(folder: Path) -> Path:
    """The model of `folder` in two shards with an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {f"model-0000{n}-of-00002.safetensors": names[n - 1 :: 2] for n in (1, 2)}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"})
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return folder


def ones(names: Iterable[str]) -> dict[str, Tensor]:
    return {name: torch.ones(1) for name in names}


def test_the_index_decides_about_a_stray_file_and_a_stale_tensor(sharded):
    expected = NviumForCausalLM.from_pretrained(sharded)
    save_file(ones(expected.state_dict()), sharded / "model.safetensors", metadata={"format": "pt"})
    second = sharded / "model-00002-of-00002.safetensors"
    tensors = load_file(second)
    stale = min(load_file(sharded / "model-00001-of-00002.safetensors"))
    save_file(tensors | ones([stale]), second, metadata={"format": "pt"})
    assert_same_weights(expected, NviumForCausalLM.from_pretrained(sharded))


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "a missing shard": (
        lambda folder: (folder / "model-00002-of-00002.safetensors").unlink(),
        "incomplete download: model-00002-of-00002.safetensors missing",
    ),
    "shards without an index": (
        lambda folder: (folder / "model.safetensors.index.json").unlink(),
        "has shards, but no model.safetensors.index.json",
    ),
    "a shard without its tensors": (
        lambda folder: save_file(ones("a"), folder / "model-00001-of-00002.safetensors", metadata={"format": "pt"}),
        "missing tensor exits.0.adapter.down.weight",
    ),
    "a LoRA adapter": (
        lambda folder: (folder / "adapter_config.json").write_text("{}"),
        "adapter_config.json: LoRA adapters are not supported",
    ),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_an_incomplete_or_foreign_folder_is_refused_by_its_cause(kind, sharded):
    break_it, cause = BROKEN[kind]
    break_it(sharded)
    with pytest.raises(CheckpointError, match=cause):
        NviumForCausalLM.from_pretrained(sharded)


def test_too_many_tensors_are_refused_before_they_are_read(folder):
    edit_tensors(folder, lambda tensors: tensors.update({f"x{n}": torch.zeros(0) for n in range(MAX_TENSORS)}))
    with pytest.raises(CheckpointError, match=r"has 20,0\d\d tensors; at most 20,000"):
        NviumForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_files_that_are_not_regular_are_refused_without_reading_them(name, folder):
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with pytest.raises(CheckpointError, match=rf"{name}: is not a regular file"):
        NviumForCausalLM.from_pretrained(folder)


def test_a_tied_configuration_with_a_different_head_is_untied(tmp_path):
    llama = random_llama(tie_word_embeddings=True)
    folder = llama_folder(tmp_path, llama)
    embedding = llama.model.embed_tokens.weight.detach()
    edit_tensors(folder, lambda tensors: tensors.update({"lm_head.weight": embedding.clone()}))
    assert NviumForCausalLM.from_pretrained(folder).config.tie_word_embeddings
    edit_tensors(folder, lambda tensors: tensors.update({"lm_head.weight": -embedding}))
    model = NviumForCausalLM.from_pretrained(folder)
    assert not model.config.tie_word_embeddings
    assert torch.equal(model.lm_head.weight, -embedding) and torch.equal(model.model.embed_tokens.weight, embedding)


def test_a_tied_file_may_store_only_the_head(tmp_path):
    folder = llama_folder(tmp_path, random_llama(tie_word_embeddings=True))
    expected = NviumForCausalLM.from_pretrained(folder)
    name = "model.embed_tokens.weight"
    edit_tensors(folder, lambda tensors: tensors.update({"lm_head.weight": tensors.pop(name)}))
    assert_same_weights(expected, NviumForCausalLM.from_pretrained(folder))
