"""Llama's relatives with random weights: model and engine compute the log-probabilities of transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedModel

from nvium_core import CheckpointError, Engine, EngineConfig, NviumForCausalLM, SamplingParams
from nvium_core.engine.device import native
from tests.model.llama_folders import LLAMA_3_ROPE
from tests.model.test_untrusted_folders import write

SHAPE: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": [60, 3],
    "pad_token_id": 0,
}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 32}
MAKES: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral with a window": ("mistral", {"sliding_window": 48, "head_dim": 12}),
    "qwen2": ("qwen2", {}),
    "qwen2, tied and stretched": ("qwen2", {"tie_word_embeddings": True, "rope_parameters": YARN}),
    "qwen2 with windows in some layers": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 48, "max_window_layers": 2},
    ),
    "qwen3": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3 with biases": ("qwen3", {"head_dim": 8, "attention_bias": True, "rope_parameters": LLAMA_3_ROPE}),
    "smollm3": ("smollm3", {}),
}
WINDOWED = {name for name, (_, fields) in MAKES.items() if fields.get("sliding_window")}
LONGEST = 48


@pytest.fixture(params=MAKES)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[PreTrainedModel, NviumForCausalLM]:
    """transformers' model, and ours loaded from its folder of several shards."""
    make, fields = MAKES[request.param]
    theirs = random_model(make, fields)
    theirs.save_pretrained(tmp_path, max_shard_size="30KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    ours = NviumForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert ours.config.max_position_embeddings == (48 if request.param in WINDOWED else 128)
    return theirs, ours


def random_model(make: str, fields: dict[str, Any]) -> PreTrainedModel:
    torch.manual_seed(0)
    config = CONFIG_MAPPING[make](**(SHAPE | fields))
    model: PreTrainedModel = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config).eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:  # initial norms and biases are ones and zeros, unlike trained ones
            torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.3)
    return model


def random_ids(rows: int, length: int) -> Tensor:
    return torch.randint(1, 60, (rows, length), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def test_relatives_give_the_log_probabilities_of_transformers(pair: tuple[PreTrainedModel, NviumForCausalLM]) -> None:
    theirs, ours = pair
    input_ids = random_ids(2, LONGEST)
    expected = theirs(input_ids).logits.log_softmax(-1)
    torch.testing.assert_close(ours(input_ids).logits, expected, rtol=0, atol=1e-5)


@torch.no_grad()
def test_the_engine_samples_the_greedy_tokens_of_transformers(pair: tuple[PreTrainedModel, NviumForCausalLM]) -> None:
    """Several prompts in one batch, each up to its end of text."""
    theirs, ours = pair
    engine = Engine(ours, EngineConfig())
    prompts = [random_ids(1, length)[0].tolist() for length in (3, 9, 20)]
    completions = engine.generate(prompts, SamplingParams(max_tokens=20, temperature=0))
    for prompt, answer in zip(prompts, completions, strict=True):
        expected = theirs.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False)[0, len(prompt) :]
        assert answer.token_ids == expected.tolist()


def test_native_calls_support_all_but_full_attention_biases(pair: tuple[PreTrainedModel, NviumForCausalLM]) -> None:
    _, ours = pair
    if ours.config.attention_bias:
        assert not native.supports(ours)
    else:
        assert native.supports(ours) or native.native_library() is None


@torch.no_grad()
def test_the_engine_gives_the_log_probabilities_of_transformers(pair: tuple[PreTrainedModel, NviumForCausalLM]) -> None:
    theirs, ours = pair
    prompt = random_ids(1, 9)[0].tolist()
    params = SamplingParams(max_tokens=12, seed=3, logprobs=1, ignore_eos=True)
    (found,) = Engine(ours, EngineConfig()).generate([prompt], params)
    log_probs = theirs(torch.tensor([prompt + found.token_ids])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    expected = log_probs.gather(1, torch.tensor(found.token_ids)[:, None]).squeeze(1)
    assert [score.logprob for score in found.scores] == pytest.approx(expected.tolist(), abs=1e-5)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        (
            {"model_type": "gemma2"},
            "'gemma2' is not supported; supported: nvium, llama, mistral, qwen2, qwen3, smollm3",
        ),
        (
            {"quantization_config": {"quant_method": "awq"}},
            "quantized by 'awq' are not supported; supported: float32, float16",
        ),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "partial_rotary_factor",
        ),
        ({"hidden_size": "wide"}, "hidden_size"),
    ],
)
def test_unsupported_configurations_are_rejected_by_name(fields: dict[str, Any], reason: str, tmp_path: Path) -> None:
    random_model("qwen3", {"head_dim": 16}).save_pretrained(tmp_path)
    write(tmp_path / "config.json", fields)
    with pytest.raises(CheckpointError, match=reason):
        NviumForCausalLM.from_pretrained(tmp_path)
