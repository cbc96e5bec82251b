"""Whatever a folder says that cannot be served is refused by name, in one line."""

import json
import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nvium_core import CheckpointError, Engine, EngineConfig, SamplingParams, load_model
from nvium_core.model.nvium import Nvium
from tests.byte_model import byte_tokenizer
from tests.model.test_untrusted_folders import write
from tests.random_models import random_model

HUGE = 10**12


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "bytes"
    random_model([1, 2], vocab_size=257, dtype=torch.float32).save_pretrained(folder)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    write(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})
    return folder


@pytest.mark.parametrize(
    "changed",
    [
        {"vocab_size": -1},
        {"vocab_size": HUGE},
        {"hidden_size": 0},
        {"intermediate_size": -4},
        {"num_attention_heads": 0},
        {"num_key_value_heads": 3},
        {"head_dim": 3},
        {"num_hidden_layers": HUGE},
        {"max_position_embeddings": HUGE},
        {"max_position_embeddings": 0},
        {"eos_token_id": 99_999},
        {"eos_token_id": [0, -1]},
        {"rms_norm_eps": -1.0},
        {"rms_norm_eps": float("nan")},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 0}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": float("inf")}},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": -2.0}},
        {"router_temperature": float("inf")},
        {"router_hidden_size": HUGE},
        {"adapter_hidden_size": -1},
        {"num_labels": HUGE},
    ],
    ids=str,
)
def test_a_configuration_that_cannot_be_served_is_refused_by_name(folder: Path, changed: dict[str, Any]) -> None:
    write(folder / "config.json", changed)
    [name] = changed
    refused = refusal(folder)
    assert "config.json" in refused
    assert any(word in refused for word in [name, *(changed[name] if isinstance(changed[name], dict) else ())])


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("content", ["[" * 100_000, '{"vocab_size": ' + "9" * 5_000 + "}"], ids=["deep", "long"])
def test_what_no_parser_takes_is_refused_with_the_files_name(folder: Path, name: str, content: str) -> None:
    (folder / name).write_text(content)
    assert name in refusal(folder)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int32, torch.bool, torch.complex64], ids=str)
def test_weights_that_are_no_floats_are_refused_with_a_tensors_name(folder: Path, dtype: torch.dtype) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["lm_head.weight"].to(dtype)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert f"tensor lm_head.weight is of {str(dtype).removeprefix('torch.')}" in refusal(folder)


def test_a_longest_text_that_is_no_number_is_refused_before_a_prompt_is_compared_with_it(folder: Path) -> None:
    write(folder / "tokenizer_config.json", {"model_max_length": "x"})
    assert "tokenizer_config.json: model_max_length must be a number" in refusal(folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_no_number_is_refused_with_its_tensors_name(folder: Path, value: float) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = value
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert "model.layers.1.mlp.up_proj.weight" in refusal(folder)


def test_more_layers_than_tensors_are_refused_before_any_is_built(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(folder / "config.json", {"num_hidden_layers": 9000, "exit_layers": [1, 9000]})
    monkeypatch.setattr(Nvium, "empty", lambda config: pytest.fail("layers were built"))
    assert "num_hidden_layers is 9000" in refusal(folder)


VALUES = [-1, 0, 1, 2, 3, HUGE, 10**400, float("nan"), float("inf"), 0.5, "x", None, True, [], [1], [-1], ["a"], {}]
MORE = ["head_dim", "rope_scaling", "attention_bias", "architectures", "dtype", "quantization_config", "id2label"]
MORE += ["num_labels", "transformers_weights"]


def test_a_configuration_with_anything_in_it_is_served_or_refused(folder: Path) -> None:
    chance, config = random.Random(7), folder / "config.json"
    good = config.read_text()
    names = [*json.loads(good), *MORE]
    num_served = 0
    for _ in range(150):
        write(config, {chance.choice(names): chance.choice(VALUES) for _ in range(chance.choice([1, 1, 2]))})
        with suppress(CheckpointError):
            loaded = load_model(str(folder), "cpu", "float32")
            context = min(64, loaded.model.config.max_position_embeddings)
            engine = Engine(loaded.model, EngineConfig(context=context))
            assert all(torch.isfinite(parameter).all() for parameter in loaded.model.parameters())
            num_served += bool(engine.generate([[1]], SamplingParams(max_tokens=min(16, context - 1))))
        config.write_text(good)
    assert num_served > 10


def refusal(folder: Path) -> str:
    """What is said, in one line."""
    with pytest.raises(CheckpointError) as refused:
        load_model(str(folder), "cpu", "float32")
    assert "\n" not in str(refused.value)
    return str(refused.value)
