"""Folders come back bit for bit, and a damaged one is refused by name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from nvium_core import CheckpointError, NviumConfig, NviumForCausalLM
from tests.model.llama_folders import llama_folder, random_llama
from tests.random_models import random_model

SAME: dict[str, torch.dtype] = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    random_model([2, 3], dtype=torch.float32).save_pretrained(tmp_path)
    return tmp_path


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    fields = json.loads(path.read_text(encoding="utf-8")) | changes
    path.write_text(json.dumps(fields), encoding="utf-8")


def edit_tensors(folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def assert_same_weights(one: NviumForCausalLM, other: NviumForCausalLM) -> None:
    ours, theirs = one.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype and torch.equal(tensor, theirs[name]), name


@pytest.mark.parametrize("dtype", SAME)
def test_a_saved_model_comes_back_bit_for_bit(dtype: str, tmp_path: Path) -> None:
    model = random_model([1, 2, 4], dtype=SAME[dtype])
    model.save_pretrained(tmp_path)
    again = NviumForCausalLM.from_pretrained(tmp_path)
    assert_same_weights(model, again)
    assert again.config.exit_layers == [1, 2, 4]


def test_a_saved_model_with_a_tied_head_comes_back_tied(tmp_path: Path) -> None:
    config = NviumConfig(
        vocab_size=17, hidden_size=16, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2,
        exit_layers=[1, 2], tie_word_embeddings=True,
    )  # fmt: skip
    model = NviumForCausalLM(config)
    model.save_pretrained(tmp_path)
    again = NviumForCausalLM.from_pretrained(tmp_path)
    assert_same_weights(model, again)
    assert again.lm_head.weight is again.model.embed_tokens.weight


def test_the_auto_classes_load_our_folder(folder: Path) -> None:
    assert isinstance(AutoConfig.from_pretrained(folder), NviumConfig)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert isinstance(model, NviumForCausalLM)
    assert_same_weights(model, NviumForCausalLM.from_pretrained(folder))


def test_the_precision_asked_for_is_the_precision_given(folder: Path) -> None:
    assert NviumForCausalLM.from_pretrained(folder, dtype=torch.float64).dtype == torch.float64
    assert NviumForCausalLM.from_pretrained(folder, torch_dtype=torch.float64).dtype == torch.float64
    assert AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).dtype == torch.bfloat16


def test_a_missing_tensor_is_refused_by_name(folder: Path) -> None:
    edit_tensors(folder, lambda tensors: tensors.pop("exits.0.router.fc2.bias"))
    with pytest.raises(CheckpointError, match=r"missing tensor exits\.0\.router\.fc2\.bias"):
        NviumForCausalLM.from_pretrained(folder)


def test_an_extra_tensor_is_refused_by_name(folder: Path) -> None:
    edit_tensors(folder, lambda tensors: tensors.update({"exits.1.router.head.bias": torch.zeros(2)}))
    with pytest.raises(CheckpointError, match=r"unexpected tensor exits\.1\.router\.head\.bias"):
        NviumForCausalLM.from_pretrained(folder)


def test_a_misshapen_tensor_is_refused_by_name_and_shape(folder: Path) -> None:
    edit_tensors(folder, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(18, 16)}))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight has shape \[18, 16\].*\[17, 16\]"):
        NviumForCausalLM.from_pretrained(folder)


def test_one_tensor_under_two_names_is_refused(folder: Path) -> None:
    edit_tensors(folder, lambda tensors: tensors.update({"early_norms.0.weight": torch.zeros(16)}))
    with pytest.raises(CheckpointError, match=r"exits\.0\.norm\.weight|early_norms\.0\.weight"):
        NviumForCausalLM.from_pretrained(folder)


def test_many_faults_are_counted_not_listed(folder: Path) -> None:
    edit_tensors(folder, lambda tensors: [tensors.pop(name) for name in list(tensors)[:8]])
    with pytest.raises(CheckpointError, match=r"and 3 more"):
        NviumForCausalLM.from_pretrained(folder)


def test_rotary_tables_may_be_in_the_file_or_not(tmp_path: Path) -> None:
    folder = llama_folder(tmp_path, random_llama())
    without = NviumForCausalLM.from_pretrained(folder).state_dict()
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_tensors(folder, lambda tensors: tensors.update({name: torch.zeros(4)}))
    with_table = NviumForCausalLM.from_pretrained(folder).state_dict()
    assert with_table.keys() == without.keys()
    assert all(torch.equal(with_table[key], tensor) for key, tensor in without.items())


@pytest.mark.parametrize("kept", [0, 4, 100, -1])
def test_truncated_weights_are_refused_naming_the_file(folder: Path, kept: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        NviumForCausalLM.from_pretrained(folder)


def test_absent_weights_are_refused_naming_the_file(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        NviumForCausalLM.from_pretrained(folder)


def test_an_absent_shard_is_refused_naming_it(tmp_path: Path) -> None:
    folder = llama_folder(tmp_path, random_llama(), shard_size="20KB")
    shard = sorted(folder.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(CheckpointError, match=shard.name):
        NviumForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"weight_map": ["a"]}', '{"weight_map": {"a": [1]}}']
    + [f'{{"weight_map": {{"a": {name}}}}}' for name in ("3", "null", '""', '"../model.safetensors"', '"/etc/passwd"')],
)
def test_a_damaged_shard_index_is_refused_naming_the_file(folder: Path, text: str) -> None:
    (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json"):
        NviumForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"model_type": "nvium", "vocab_size": "many"}'])
def test_a_damaged_configuration_is_refused_naming_the_file(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text, encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        NviumForCausalLM.from_pretrained(folder)


def test_a_configuration_that_is_not_text_is_refused_naming_the_file(folder: Path) -> None:
    (folder / "config.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        NviumForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("model_type", ["gpt2", "", None])
def test_another_kind_of_model_is_refused_naming_it(folder: Path, model_type: str | None) -> None:
    edit_config(folder, model_type=model_type)
    with pytest.raises(CheckpointError, match=f"model_type {model_type!r}"):
        NviumForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("exit_layers", [3, 2]),
        ("exit_layers", [1, 2]),
        ("exit_layers", "deep"),
        ("num_attention_heads", 5),
        ("router_temperature", 0),
        ("hidden_act", "no-such-function"),
        ("router_hidden_size", 0),
        ("nvium_format", 2),
    ],
)
def test_an_impossible_configuration_is_refused_naming_the_field(folder: Path, field: str, value: Any) -> None:
    edit_config(folder, **{field: value})
    with pytest.raises(CheckpointError, match=field if field != "num_attention_heads" else "attention"):
        NviumForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_rotary_tables_that_depend_on_the_company_are_refused(tmp_path: Path, rope_type: str) -> None:
    folder = llama_folder(tmp_path, random_llama())
    half = [1.0] * 4
    factors = {"factor": 2.0} if rope_type == "dynamic" else {"factor": 2.0, "short_factor": half, "long_factor": half}
    rope = {"rope_type": rope_type, "rope_theta": 10_000.0, "original_max_position_embeddings": 64, **factors}
    edit_config(folder, rope_parameters=rope)
    with pytest.raises(CheckpointError, match=f"{rope_type}.*: default, linear, llama3, yarn"):
        NviumForCausalLM.from_pretrained(folder)


def test_a_folder_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere"):
        NviumForCausalLM.from_pretrained(tmp_path / "nowhere")


def test_a_file_is_not_a_folder(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: no such model folder"):
        NviumForCausalLM.from_pretrained(folder / "config.json")


def test_the_folders_own_generation_settings_are_kept(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": [3, 5]}', encoding="utf-8")
    model = NviumForCausalLM.from_pretrained(folder)
    assert model.generation_config is not None and model.generation_config.eos_token_id == [3, 5]


def test_weights_of_another_kind_are_refused_with_the_kinds_that_load(tmp_path: Path) -> None:
    random_model([1]).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="weights load from safetensors and GGUF files alone"):
        NviumForCausalLM.from_pretrained(tmp_path)
