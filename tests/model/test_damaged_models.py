import json
import random
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from nvium_core import CheckpointError, Engine, EngineConfig, SamplingParams, load_model
from nvium_core.model.nvium import Nvium
from tests.byte_model import NAME, save_byte_model
from tests.model.llama_folders import edit_tensors
from tests.model.test_untrusted_folders import write

HUGE = 10**12


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_byte_model(tmp_path / NAME)


@pytest.mark.parametrize(
    "changed",
    [
        {"exit_layers": [2, 1]},
        {"exit_layers": "deep"},
        {"model_type": None},
        {"nvium_format": 3},
        {"hidden_act": "gelu"},
        {"num_attention_heads": 5},
        {"router_temperature": 0},
        {"router_hidden_size": 0},
        {"vocab_size": -1},
        {"vocab_size": "many"},
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
        {"eos_token_id": 1.5},
        {"rms_norm_eps": -1.0},
        {"rms_norm_eps": float("nan")},
        *({"rope_parameters": {"rope_type": "default", "rope_theta": theta}} for theta in (0, None, "10000", True, [])),
        {"rope_parameters": {"rope_type": "default", "rope_theta": float("inf")}},
        {"rope_parameters": "linear"},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": -2.0}},
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
        {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0], "long_factor": [1.0]}},
        {"router_temperature": float("inf")},
        {"router_hidden_size": HUGE},
        {"adapter_hidden_size": -1},
        {"num_labels": HUGE},
    ],
    ids=str,
)
def test_an_invalid_configuration_is_rejected_by_name(folder, changed):
    write(folder / "config.json", changed)
    [name] = changed
    error = load_error(folder)
    assert "config.json" in error
    assert any(word in error for word in [name, *(changed[name] if isinstance(changed[name], dict) else ())])


DAMAGES = {"deep": b"[" * 100_000, "long": b'{"vocab_size": ' + b"9" * 5_000 + b"}", "empty": b"", "open": b"{"}
DAMAGES |= {"not UTF-8": b"\xff\xfe", "a list": b"[]", "null": b"null"}


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_file_that_cannot_be_parsed_is_rejected_by_name(folder, name, damage):
    (folder / name).write_bytes(DAMAGES[damage])
    assert name in load_error(folder)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int32, torch.bool, torch.complex64], ids=str)
def test_weights_that_are_not_floats_are_rejected_by_name(folder, dtype):
    name = "lm_head.weight"
    edit_tensors(folder, lambda tensors: tensors.update({name: tensors[name].to(dtype)}))
    assert f"tensor {name} has dtype {str(dtype).removeprefix('torch.')}" in load_error(folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_rejected_by_name(folder, value):
    name = "model.layers.1.mlp.up_proj.weight"
    edit_tensors(folder, lambda tensors: tensors[name][3, 5].fill_(value))
    model = load_model(str(folder), "cpu", "float32").model
    with pytest.raises(CheckpointError, match=f"tensor {name} has NaN or infinite values"):  # while packing
        Engine(model, EngineConfig(context=16))


@pytest.mark.parametrize("named", [1.5, "x", [1.5], [-1], -2])
def test_an_invalid_end_of_text_token_is_rejected_by_name(folder, named):
    write(folder / "generation_config.json", {"eos_token_id": named})
    assert "generation_config.json: eos_token_id must be an integer in [0, 257)" in load_error(folder)


def test_a_maximum_length_that_is_not_a_number_is_rejected(folder):
    write(folder / "tokenizer_config.json", {"model_max_length": "x"})
    assert "tokenizer_config.json: model_max_length must be a number" in load_error(folder)


def test_more_layers_than_tensors_are_rejected_before_any_is_built(folder, monkeypatch):
    write(folder / "config.json", {"num_hidden_layers": 9000, "exit_layers": [1, 9000]})
    monkeypatch.setattr(Nvium, "empty", lambda config: pytest.fail("layers were built"))
    assert "num_hidden_layers is 9000" in load_error(folder)


VALUES = [-1, 0, 1, 2, 3, HUGE, 10**400, float("nan"), float("inf"), 0.5, "x", None, True, [], [1], [-1], ["a"], {}]
MORE = ["head_dim", "rope_scaling", "attention_bias", "architectures", "dtype", "quantization_config", "id2label"]
MORE += ["num_labels", "transformers_weights"]


def test_a_randomly_damaged_configuration_is_served_or_rejected(folder):
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


def load_error(folder: Path) -> str:
    with pytest.raises(CheckpointError) as error:
        load_model(str(folder), "cpu", "float32")
    assert "\n" not in str(error.value)
    return str(error.value)
