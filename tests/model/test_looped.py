"""Looped models load, and compute what a public implementation of them computes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from nvium_core import Engine, EngineConfig, NviumForCausalLM, SamplingParams
from nvium_core.conversion import convert
from nvium_core.errors import CheckpointError
from nvium_core.model import mixture
from nvium_core.model.backbones import nanbeige_fields
from nvium_core.model.llama import causal_attention
from tests.engine.driving import Layers, engine_on
from tests.model.gguf_files import write_gguf
from tests.model.llama_folders import llama_folder, random_llama
from tests.model.looped_folders import FIXTURES, NANBEIGE, OURO, expected_of, ouro_folder, resized, without

needs_fixtures = pytest.mark.skipif(not FIXTURES.is_dir(), reason="no fixtures of looped models next to this checkout")

TOLERANCE = {torch.float64: (1e-5, 1e-5), torch.float32: (5e-5, 2e-6)}
"""Of log-probabilities and of probabilities. Angles are float32, which in float64 costs 1e-5."""


def load(name: str, dtype: torch.dtype) -> NviumForCausalLM:
    return NviumForCausalLM.from_pretrained(FIXTURES / name, dtype=dtype)


@torch.no_grad()
def computed(model: NviumForCausalLM, token_ids: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return log w [T, E, 2], log p [T, E] and log π_k [T, E, V]."""
    ids_BT = torch.tensor([token_ids])
    states = model.hidden_states(ids_BT, torch.arange(len(token_ids))[None], causal_attention())
    log_w, outputs = model.exit_outputs(states)
    logits = torch.stack([model.lm_head(o) for o in outputs], dim=-2)
    return log_w[0], mixture.log_exit_probs(log_w)[0], logits[0].log_softmax(-1)


@needs_fixtures
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", OURO)
def test_every_loop_of_ouro_gate_and_mixture_equal_the_public_implementation(name, dtype):
    model, of_logprob, of_p = load(name, dtype), *TOLERANCE[dtype]
    for prompt in expected_of(name)["prompts"]:
        log_w, log_p, log_pi = computed(model, prompt["token_ids"])
        log_mix = (log_p[..., None] + log_pi).logsumexp(-2)
        for row in prompt["positions"]:
            t = row["position"]
            loops = row["logprobs_of_loop_at_ids"]
            gates = row["gate"][: len(loops) - 1]  # the last loop's gate is not used
            assert log_w[t, : len(gates), 1].exp().tolist() == pytest.approx(gates, abs=of_p)
            assert log_p[t].exp().tolist() == pytest.approx(row["p"], abs=of_p)
            assert log_pi[t].argmax(-1).tolist() == row["argmax_of_loop"]
            for k, own in enumerate(loops):
                assert log_pi[t, k, prompt["ids"]].tolist() == pytest.approx(own, abs=of_logprob)
            assert int(log_mix[t].argmax()) == row["argmax_of_mixture"]
            assert log_mix[t, prompt["ids"]].tolist() == pytest.approx(row["log_mixture_at_ids"], abs=of_logprob)


@needs_fixtures
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", NANBEIGE)
def test_the_only_exit_of_nanbeige_equals_the_public_implementation(name, dtype):
    model = load(name, dtype)
    for prompt in expected_of(name)["prompts"]:
        _, _, log_pi = computed(model, prompt["token_ids"])
        assert log_pi.shape[1] == 1
        for row in prompt["positions"]:
            own = log_pi[row["position"], 0]
            assert int(own.argmax()) == row["argmax"]
            assert own[prompt["ids"]].tolist() == pytest.approx(row["logprobs_at_ids"], abs=TOLERANCE[dtype][0])


def greedy(engine: Engine, token_ids: list[int], **sampling: Any) -> Any:
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, **sampling)
    return engine.generate([token_ids], params)[0]


@needs_fixtures
@pytest.mark.parametrize("backend", ["kernels", "layers"])
@pytest.mark.parametrize("schedule", ["whole", "sweep"])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", OURO)
def test_greedy_tokens_exits_and_scores_of_ouro_equal_the_public_implementation(name, dtype, schedule, backend):
    config, model = EngineConfig(schedule=schedule, page_size=4), load(name, dtype)
    engine = Engine(model, config) if backend == "kernels" else engine_on(Layers, model, config)
    values = expected_of(name)
    for prompt in values["prompts"]:
        assert greedy(engine, prompt["token_ids"]).token_ids == prompt["greedy"]["1.0"], "the default is the last loop"
        assert greedy(engine, prompt["token_ids"], sampling="exits").token_ids == prompt["greedy_of_mixture"]
        for q, tokens in prompt["greedy"].items():
            asked = {"sampling": "threshold", "threshold": float(q), "logprobs": 0, "prompt_logprobs": True}
            found = greedy(engine, prompt["token_ids"], **asked)
            assert found.token_ids == tokens
            last = prompt["positions"][-1]["threshold"][q]
            assert (found.exits[0], found.token_ids[0]) == (last["exit_loop"], last["argmax"])
            assert found.scores[0].logprob == pytest.approx(last["logprob_of_argmax"], abs=TOLERANCE[dtype][0])


@needs_fixtures
@pytest.mark.parametrize("name", NANBEIGE)
def test_greedy_tokens_of_nanbeige_equal_the_public_implementation(name):
    engine = Engine(load(name, torch.float64))
    for prompt in expected_of(name)["prompts"]:
        assert greedy(engine, prompt["token_ids"]).token_ids == prompt["greedy"]


def test_an_ouro_leaves_after_its_last_loop_unless_its_file_has_a_lower_threshold(tmp_path):
    plain = NviumForCausalLM.from_pretrained(ouro_folder(tmp_path / "plain"))
    assert (plain.config.default_sampling, plain.config.exit_layers) == ("original", [2, 4, 6])
    assert {*Engine(plain).generate([[1, 2]], SamplingParams(seed=0))[0].exits} == {3}
    early = NviumForCausalLM.from_pretrained(ouro_folder(tmp_path / "early", early_exit_threshold=1e-6))
    assert {*Engine(early).generate([[1, 2]], SamplingParams(seed=0))[0].exits} == {1}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"total_ut_steps": 0}, "total_ut_steps must be between 1 and 1000, got 0"),
        ({"total_ut_steps": 10**6}, "total_ut_steps must be between 1 and 1000, got 1000000"),
        ({"total_ut_steps": "4"}, "total_ut_steps must be between 1 and 1000, got '4'"),
        ({"use_sliding_window": True}, "use_sliding_window must be false"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types must all be full_attention"),
        ({"early_exit_step": 1}, "early_exit_step is not supported"),
        ({"early_exit_threshold": 0}, "early_exit_threshold must be a finite number above 0"),
        ({"early_exit_threshold": True}, "early_exit_threshold must be a finite number above 0"),
    ],
)
def test_a_field_of_ouro_that_changes_the_model_is_refused_by_name(tmp_path, wrong, message):
    with pytest.raises(CheckpointError, match=message):
        NviumForCausalLM.from_pretrained(ouro_folder(tmp_path, **wrong))


def test_an_ouro_without_its_gate_or_with_another_gate_is_refused(tmp_path):
    for part in ("weight", "bias"):
        with pytest.raises(CheckpointError, match=rf"missing tensor model\.early_exit_gate\.{part}"):
            NviumForCausalLM.from_pretrained(without(ouro_folder(tmp_path), f"model.early_exit_gate.{part}"))
    with pytest.raises(CheckpointError, match=r"early_exit_gate\.weight has shape \[1, 8\], expected \[1, 16\]"):
        NviumForCausalLM.from_pretrained(resized(ouro_folder(tmp_path), "model.early_exit_gate.weight", 1, 8))


@pytest.mark.parametrize("name", ["enable_mhc", "loop_middle_layers", "qk_layernorm"])
def test_a_field_of_nanbeige_that_changes_the_model_is_refused_by_name(tmp_path, name):
    folder = ouro_folder(tmp_path, model_type="nanbeige", num_loops=2, **{name: 1})
    with pytest.raises(CheckpointError, match=f"{name} is 1, which is not supported"):
        NviumForCausalLM.from_pretrained(folder)


def test_the_loops_of_nanbeige_follow_from_its_loss_weights_if_it_has_any():
    given = {"num_hidden_layers": 3, "num_loops": 2}
    assert nanbeige_fields(given) == {"num_loops": 2, "norms_loops": True}
    assert nanbeige_fields(given | {"loop_loss_weights": [0.1, 0.2]}) == {"num_loops": 3, "norms_loops": True}
    assert nanbeige_fields(given | {"skip_loop_final_norm": True}) == {"num_loops": 2, "norms_loops": False}
    assert nanbeige_fields({"num_hidden_layers": 3}) == {"num_loops": 1, "norms_loops": False}


def nanbeige_folder(folder: Path, **fields: Any) -> Path:
    llama_folder(folder, random_llama())
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "nanbeige"} | fields), encoding="utf-8")
    return folder


@torch.no_grad()
@pytest.mark.parametrize("skips_norm", [False, True])
def test_a_nanbeige_computes_the_layers_of_its_llama_again(tmp_path, skips_norm):
    """The oracle is transformers' Llama, so this needs no fixtures."""
    folder = nanbeige_folder(tmp_path, num_loops=3, skip_loop_final_norm=skips_norm)
    llama, ids = random_llama(), torch.arange(1, 21)[None]
    states, norm = llama.model.embed_tokens(ids), llama.model.norm
    for loop in range(3):
        llama.model.norm = torch.nn.Identity() if skips_norm and loop < 2 else norm
        states = llama.model(inputs_embeds=states, use_cache=False).last_hidden_state
    expected = llama.lm_head(states).log_softmax(-1)
    torch.testing.assert_close(NviumForCausalLM.from_pretrained(folder)(ids).logits, expected, rtol=0, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("skips_norm", [False, True])
def test_a_gguf_file_of_nanbeige_equals_its_folder(tmp_path, skips_norm):
    fields = {"num_loops": 3, "skip_loop_final_norm": skips_norm}
    folder = NviumForCausalLM.from_pretrained(nanbeige_folder(tmp_path / "folder", **fields))
    stored = {f"nanbeige.{name}": value for name, value in fields.items()} | {"tokenizer.ggml.model": "no_vocab"}
    path = write_gguf(tmp_path / "file.gguf", random_llama(), tokenizer=stored, architecture="nanbeige")
    file, ids = NviumForCausalLM.from_pretrained(path), torch.arange(1, 21)[None]
    assert (file.config.num_loops, file.config.norms_loops, file.config.exit_layers) == (3, not skips_norm, [9])
    torch.testing.assert_close(file(ids).logits, folder(ids).logits, rtol=0, atol=1e-6)


def test_a_gguf_file_of_ouro_is_refused(tmp_path):
    path = write_gguf(tmp_path / "file.gguf", random_llama(), architecture="ouro")
    with pytest.raises(CheckpointError, match="architecture 'ouro' is not supported"):
        NviumForCausalLM.from_pretrained(path)


@torch.no_grad()
def test_a_converted_or_saved_ouro_computes_the_same(tmp_path):
    model = NviumForCausalLM.from_pretrained(ouro_folder(tmp_path / "ouro", early_exit_threshold=0.5))
    line = str(convert(tmp_path / "ouro", tmp_path / "converted"))
    assert "a 3-vium, exits after loop 1, loop 2, loop 3, " in line
    model.save_pretrained(tmp_path / "saved")
    ids = torch.arange(1, 21)[None]
    for name in ("converted", "saved"):
        again = NviumForCausalLM.from_pretrained(tmp_path / name)
        assert torch.equal(again(ids).logits, model(ids).logits)
        assert (again.config.default_sampling, again.config.exit_threshold) == ("threshold", 0.5)


def test_transformers_generates_with_a_cache_for_every_loop(tmp_path):
    model, ids = NviumForCausalLM.from_pretrained(ouro_folder(tmp_path)).double(), torch.arange(1, 10)[None]
    with_cache, without = (
        model.generate(ids, max_new_tokens=8, do_sample=False, use_cache=use) for use in (True, False)
    )
    assert torch.equal(with_cache, without)
