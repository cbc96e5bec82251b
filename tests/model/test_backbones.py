"""Llamas and their relatives with random weights are N-viums with one exit and no adapter.

Model and engine compute the log-probabilities of transformers.
"""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedModel

from nvium_core import CheckpointError, Engine, EngineConfig, NviumForCausalLM, SamplingParams
from nvium_core.engine.device import processor
from nvium_core.engine.device.native import library, weights
from nvium_core.engine.limits import eos_token_ids
from nvium_core.model.stored import quantize_model
from tests.engine.driving import Layers, engine_on
from tests.model.llama_folders import LLAMA_3_ROPE, SHAPE, llama_folder, random_llama
from tests.model.test_untrusted_folders import write

OWN_SHAPE = SHAPE | {"num_hidden_layers": 4, "eos_token_id": [60, 3]}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 32}
ALTERNATING = ["sliding_attention", "full_attention"] * 2
GEMMA: dict[str, Any] = {"head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 8, "pad_token_id": None}
TWO_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 8.0},
}
GRANITE: dict[str, Any] = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.1,
    "logits_scaling": 6.0,
    "tie_word_embeddings": True,
}
GRANITE_4 = {
    "num_local_experts": 0,
    "layer_types": ["full_attention"] * 4,
    "shared_intermediate_size": 40,
    "mamba_n_heads": 8,
}
MAKES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "multi-head llama": ("llama", {"num_key_value_heads": 4}),
    "llama with one key head": ("llama", {"num_key_value_heads": 1}),
    "llama 3": ("llama", {"rope_parameters": LLAMA_3_ROPE}),
    "stretched llama": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0}}),
    "tied llama": ("llama", {"tie_word_embeddings": True}),
    "llama with biases and wide heads": ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 12}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral with a window": ("mistral", {"sliding_window": 7, "head_dim": 12}),
    "qwen2": ("qwen2", {}),
    "qwen2, tied and stretched": ("qwen2", {"tie_word_embeddings": True, "rope_parameters": YARN}),
    "qwen2 with windows in some layers": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2},
    ),
    "qwen3": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3 with biases": ("qwen3", {"head_dim": 8, "attention_bias": True, "rope_parameters": LLAMA_3_ROPE}),
    "qwen3 whose width is no multiple of its heads": ("qwen3", {"head_dim": 8, "num_attention_heads": 6}),
    "mistral whose width is no multiple of its heads": (
        "mistral",
        {"sliding_window": None, "head_dim": 8, "num_attention_heads": 6},
    ),
    "smollm3": ("smollm3", {}),
    "gemma3": ("gemma3_text", GEMMA | {"num_hidden_layers": 7, "rope_parameters": TWO_ROPES}),
    "gemma3 with an attention scale and a cap": (
        "gemma3_text",
        GEMMA | {"query_pre_attn_scalar": 24, "layer_types": ALTERNATING, "final_logit_softcapping": 2.0},
    ),
    "gemma2": ("gemma2", GEMMA | {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0}),
    "granite": ("granite", GRANITE),
    "granite 4": ("granitemoehybrid", GRANITE | GRANITE_4 | {"position_embedding_type": "rope"}),
    "granite 4 without rotary embedding": ("granitemoehybrid", GRANITE | GRANITE_4),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", {"sliding_window": 6, "rope_parameters": {"full_attention": YARN | {"attention_factor": 1.2}}}),
    "exaone4": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 4}),
    "exaone4 with windows": ("exaone4", {"sliding_window": 6, "sliding_window_pattern": 3}),
    "ernie4_5": ("ernie4_5", {"head_dim": 12, "rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}),
    "glm4": ("glm4", {"head_dim": 8}),
    "hunyuan": (
        "hunyuan_v1_dense",
        {"head_dim": 8, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 9.0, "factor": 1.0, "alpha": 50.0}},
    ),
    "phi3": ("phi3", {"rope_parameters": YARN | {"rope_type": "default", "partial_rotary_factor": 0.5}}),
    "arcee": ("arcee", {"hidden_act": "relu2"}),
}
LONGEST = 48
F32 = 5e-5
"""Tolerance of log-probabilities in float32. Ernie rotates in another order, and Gemma has large states."""
Pair = tuple[PreTrainedModel, NviumForCausalLM]


@pytest.fixture(params=MAKES)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Pair:
    """transformers' model, and ours loaded from its folder of several shards."""
    make, fields = MAKES[request.param]
    theirs = random_model(make, fields)
    theirs.save_pretrained(tmp_path, max_shard_size="30KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    ours = NviumForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert ours.config.max_position_embeddings == 128
    assert any(ours.config.windows) == bool(fields.get("sliding_window"))
    return theirs, ours


def random_model(make: str, fields: dict[str, Any]) -> PreTrainedModel:
    torch.manual_seed(0)
    config = CONFIG_MAPPING[make](**(OWN_SHAPE | fields))
    model: PreTrainedModel = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config).eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:  # initial norms and biases are ones and zeros, unlike trained ones
            torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.3)
    return model


def random_ids(rows: int, length: int) -> Tensor:
    return torch.randint(1, 60, (rows, length), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def test_the_log_probabilities_are_those_of_transformers_and_all_but_full_attention_biases_run_natively(pair):
    theirs, ours = pair
    assert ours.config.num_exits == 1
    if library.native_library(processor.instructions()):
        assert weights.supports(ours) == (not ours.config.attention_bias)
    input_ids = random_ids(2, LONGEST)
    torch.testing.assert_close(ours(input_ids).logits, theirs(input_ids).logits.log_softmax(-1), rtol=0, atol=F32)


@torch.no_grad()
def test_the_engine_samples_the_greedy_tokens_and_gives_the_log_probabilities_of_transformers(pair):
    """Several prompts in one batch, each up to its end of text. All tokens are scored."""
    theirs, ours = pair
    prompts = [random_ids(1, length)[0].tolist() for length in (3, 9, 20)]
    params = SamplingParams(max_tokens=20, temperature=0, logprobs=1, prompt_logprobs=True)
    answers = Engine(ours, EngineConfig()).generate(prompts, params)
    texts = [theirs.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False)[0] for prompt in prompts]
    theirs.double()  # in float32 their error is up to 1.3e-5, and ours 6e-6 (on a Xeon with AMX)
    for prompt, answer, text in zip(prompts, answers, texts, strict=True):
        assert prompt + answer.token_ids == text.tolist()
        expected = theirs(text[None]).logits[0, :-1].log_softmax(-1).gather(1, text[1:, None]).squeeze(1)
        scores = [*answer.prompt_scores, *answer.scores]
        assert [score.logprob for score in scores] == pytest.approx(expected.tolist(), abs=F32)


@pytest.mark.parametrize("weights", ["q8", "q4"])
def test_quantized_kernels_agree_with_the_layers(pair, weights):
    prompt, params = random_ids(1, 20)[0].tolist(), SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    quantize_model(pair[1], weights)
    kernels, layers = (
        make_engine(pair[1], EngineConfig(page_size=4)).generate([prompt], params)
        for make_engine in (Engine, partial(engine_on, Layers))
    )
    assert kernels[0].token_ids == layers[0].token_ids


@torch.no_grad()
def test_left_padding_changes_nothing(pair):
    theirs, ours = pair
    input_ids = random_ids(2, 12)
    mask = torch.ones_like(input_ids)
    mask[0, :5] = 0
    inputs = {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    expected = theirs(input_ids, **inputs).logits.log_softmax(-1)
    found = ours(input_ids, **inputs).logits
    torch.testing.assert_close(found[mask.bool()], expected[mask.bool()], rtol=0, atol=F32)
    torch.testing.assert_close(found[:1, 5:], ours(input_ids[:1, 5:]).logits, rtol=0, atol=F32)


@torch.no_grad()
def test_greedy_generation_is_that_of_transformers(pair):
    theirs, ours = pair
    input_ids = random_ids(2, 9)
    mask = torch.ones_like(input_ids)
    mask[1, :4] = 0
    options: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    expected = theirs.generate(input_ids, **options)
    assert expected.shape == (2, 21)
    assert torch.equal(ours.generate(input_ids, **options), expected)


@torch.no_grad()
def test_a_cache_changes_nothing(pair):
    ours = pair[1].double()
    input_ids = random_ids(1, 20)
    whole = ours(input_ids).logits
    first = ours(input_ids[:, :7], use_cache=True)
    second = ours(input_ids[:, 7:19], past_key_values=first.past_key_values)
    third = ours(input_ids[:, 19:], past_key_values=second.past_key_values)
    torch.testing.assert_close(torch.cat([first.logits, second.logits, third.logits], 1), whole, rtol=0, atol=F32)


@torch.no_grad()
def test_logits_are_kept_for_the_last_positions_only_when_asked(tmp_path):
    llama = NviumForCausalLM.from_pretrained(llama_folder(tmp_path, random_llama()))
    input_ids = random_ids(2, 6)
    assert torch.equal(llama(input_ids, logits_to_keep=2).logits, llama(input_ids).logits[:, -2:])


@torch.no_grad()
@pytest.mark.parametrize("fields", [{"hidden_act": "swish"}, {"eos_token_id": -1}, {"sliding_window": 16}], ids=str)
def test_a_llama_with_a_field_that_changes_nothing_is_that_llama(fields, tmp_path):
    theirs = random_llama()
    plain = NviumForCausalLM.from_pretrained(llama_folder(tmp_path, theirs)).config.to_dict()
    for name in ("config.json", "generation_config.json"):
        write(tmp_path / name, fields)
    ours = NviumForCausalLM.from_pretrained(tmp_path)
    assert ours.config.to_dict() == plain and not eos_token_ids(ours)
    input_ids = random_ids(1, 40)
    torch.testing.assert_close(ours(input_ids).logits, theirs(input_ids).logits.log_softmax(-1), rtol=0, atol=1e-5)


UNSUPPORTED: list[tuple[str, dict[str, Any], str]] = [
    (
        "llama",
        {"model_type": "lfm2"},
        "'lfm2' is not supported; supported: nvium, llama, mistral, qwen2, qwen3, smollm3",
    ),
    (
        "llama",
        {"quantization_config": {"quant_method": "awq"}},
        "by 'awq' are not supported; supported: float32, float16",
    ),
    ("llama", {"rope_parameters": YARN | {"partial_rotary_factor": 1.5}}, "partial_rotary_factor"),
    ("llama", {"hidden_size": "wide"}, "hidden_size"),
    ("gemma2", {"sliding_window": 2**64 + 1}, "windows must be between 1 and 16777216"),
    ("phi3", {"num_key_value_heads": 1}, "missing tensor"),  # the fused matrix has another shape
]


@pytest.mark.parametrize(("make", "fields", "reason"), UNSUPPORTED)
def test_unsupported_configurations_are_rejected_by_name(make, fields, reason, tmp_path):
    random_model(*MAKES[make]).save_pretrained(tmp_path)
    write(tmp_path / "config.json", fields)
    with pytest.raises(CheckpointError, match=reason):
        NviumForCausalLM.from_pretrained(tmp_path)
