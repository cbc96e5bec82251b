"""`sampling: original`: tokens equal the last exit's, whatever was drafted."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare
from transformers import LlamaForCausalLM

from nvium_core import Engine, EngineConfig, InvalidRequest, NviumForCausalLM, SamplingParams
from nvium_core.engine.device.sampling import race
from nvium_core.engine.schedule.drafting import Drafting
from nvium_core.engine.schedule.sequence import Sequence as EngineSequence
from nvium_core.training.retrofitting.retrofit import with_exits
from tests import reference
from tests.engine import test_exactness
from tests.engine.driving import columns, drained, together
from tests.engine.test_exactness import Request, configs, explicit_logprobs
from tests.model.llama_folders import llama_folder, random_llama
from tests.random_models import random_model

VOCAB_SIZE = 11
PROMPTS = [[3, 1, 4, 1, 5], [3, 1, 4, 1, 5, 9, 2, 6], [7], [3, 1, 4, 2]]


def agreeing_model(seed: int = 0) -> NviumForCausalLM:
    """A model whose later blocks change little, so its exits agree."""
    model = random_model([1, 2, 4], seed=seed, vocab_size=VOCAB_SIZE)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.startswith("model.layers.") and not name.startswith("model.layers.0."):
                weight.mul_(0.6 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1)
            if ".adapter." in name:
                weight.mul_(0.3)
            if name.startswith("exits.") and name.endswith(".norm.weight") and "router" not in name:
                weight.fill_(1)
    return model


def retrofitted(llama: NviumForCausalLM, exit_layers: list[int]) -> NviumForCausalLM:
    model = NviumForCausalLM(with_exits(llama.config, exit_layers))
    model.model.load_state_dict(llama.model.state_dict())
    model.lm_head.load_state_dict(llama.lm_head.state_dict())
    for number in range(len(exit_layers)):
        model.get_parameter(f"exits.{number}.norm.weight").data.copy_(llama.get_parameter("exits.0.norm.weight"))
    model.generation_config = llama.generation_config
    return model


class Whims(Drafting):
    """Random drafts, some copied from the text."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._whim = Random(seed)

    def drafts_for(self, sequence: EngineSequence, num_running: int) -> Sequence[int]:
        if not sequence.may_draft or sequence.num_drafts:
            return ()
        copied = sequence.token_ids[-self._whim.choice([1, 2, 3]) :] if self._whim.random() < 0.7 else []
        drafts = [*copied, *(self._whim.randrange(VOCAB_SIZE) for _ in range(7))]
        return drafts[: self._whim.choice([0, 1, 2, 3, 7])]


def whimsical(model: NviumForCausalLM, seed: int, config: EngineConfig | None = None) -> Engine:
    engine = Engine(model, config)
    engine.scheduler.drafts = Whims(seed)
    return engine


def expected(model: NviumForCausalLM, prompt: list[int], params: SamplingParams, choice: int = 0) -> list[int]:
    """Return the tokens of the reference, which uses no drafts."""
    request = Request(prompt, params, arrives=0, is_cancelled=None)
    return [each.token_id for each in test_exactness.expected(model, request, choice)]


wishes = st.builds(
    SamplingParams,
    sampling=st.just("original"),
    seed=st.integers(0, 2**63 - 1),
    max_tokens=st.integers(1, 24),
    temperature=st.sampled_from([1.0, 1.0, 0.6, 0.0]),
    top_k=st.sampled_from([0, 0, 3]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.0, 1.3]),
    stop_token_ids=st.sampled_from([(), (4,)]),
    n=st.sampled_from([1, 1, 2]),
)


@given(st.integers(0, 9), configs, st.lists(st.tuples(st.sampled_from(PROMPTS), wishes), min_size=1, max_size=4))
def test_tokens_equal_the_reference_whatever_is_drafted(seed, config, plan):
    model = agreeing_model(seed % 3)
    engine = whimsical(model, seed, replace(config, cache_tokens=40))
    for number, (prompt, params) in enumerate(plan):
        engine.add(str(number), prompt, params)
    for (request, choice), completion in drained(engine).items():
        prompt, params = plan[int(request)]
        assert completion.token_ids == expected(model, prompt, params, choice)
        assert set(completion.exit_probabilities) <= {1.0}
    drafts = engine.scheduler.drafts
    assert drafts.num_accepted <= drafts.num_drafted


LONG = SamplingParams(sampling="original", seed=8, max_tokens=40, ignore_eos=True)


def test_early_exits_change_no_token():
    model = agreeing_model()
    found = [completion.token_ids for completion in Engine(model).generate(PROMPTS, LONG)]
    with torch.no_grad():
        for exit_ in model.exits[:-1]:
            exit_.get_parameter("norm.weight").fill_(torch.nan)
    assert [completion.token_ids for completion in Engine(model).generate(PROMPTS, LONG)] == found


@pytest.mark.parametrize("exits", [[1, 2, 4], [4]])
def test_a_text_that_repeats_itself_is_drafted_by_copying_from_it(exits):
    """At temperature 0 a random model repeats one token."""
    model = random_model(exits, vocab_size=VOCAB_SIZE)
    params = replace(LONG, temperature=0.0, max_tokens=50)
    engine = Engine(model, EngineConfig(max_drafts=6))
    completions = engine.generate(PROMPTS, params)
    assert [each.token_ids for each in completions] == [expected(model, prompt, params) for prompt in PROMPTS]
    assert engine.scheduler.drafts.num_drafted >= engine.scheduler.drafts.num_accepted > 60


def test_preemption_with_drafts_and_prefix_caching_changes_no_token(monkeypatch):
    model = agreeing_model()
    engine = whimsical(model, 1, EngineConfig(max_sequences=4, page_size=2, cache_tokens=64))
    preempt, had_drafts = engine.admission.preempt, list[bool]()

    def noted(sequence: EngineSequence) -> None:
        had_drafts.append(sequence.num_tokens > sequence.num_verified)
        preempt(sequence)

    monkeypatch.setattr(engine.admission, "preempt", noted)
    asked = [(prompt, replace(LONG, seed=seed, max_tokens=24)) for seed in range(3) for prompt in PROMPTS]
    assert [found.token_ids for found in together(engine, asked)] == [expected(model, *own) for own in asked]
    assert had_drafts.count(True) > 2
    assert engine.pool.num_rows_found > 0
    assert engine.scheduler.drafts.num_accepted > 20


def test_no_page_of_a_wrong_draft_is_shared():
    model = agreeing_model()
    engine = whimsical(model, 3, EngineConfig(page_size=1, cache_tokens=400))
    (first,) = engine.generate([PROMPTS[0]], LONG)
    known = PROMPTS[0] + first.token_ids
    for length in (6, 12, 25):
        params = replace(LONG, max_tokens=8)
        (again,) = engine.generate([known[:length]], params)
        assert again.token_ids == expected(model, known[:length], params)
    assert engine.pool.num_rows_found > 0


@pytest.mark.parametrize("wish", [{"logprobs": 2}, {"logprobs": 0, "prompt_logprobs": True}, {"probabilities": True}])
def test_log_probabilities_are_those_of_the_last_exit(wish):
    model = agreeing_model()
    (found,) = Engine(model, EngineConfig(max_drafts=3)).generate([PROMPTS[0]], replace(LONG, **wish))
    token_ids, scores = PROMPTS[0] + found.token_ids, [*found.prompt_scores, *found.scores]
    first = len(token_ids) - len(scores)
    explicit = explicit_logprobs(model, token_ids[:first], token_ids[first:], [3] * len(scores))
    assert [score.logprob for score in scores] == pytest.approx(explicit, abs=1e-10)
    assert all(score.exit_probabilities == (0, 0, 1) for score in scores)


@pytest.mark.parametrize("max_drafts", [0, 3])
def test_a_retrofitted_llama_generates_the_same_tokens(tmp_path, max_drafts):
    folder = llama_folder(tmp_path, random_llama(num_hidden_layers=4, vocab_size=50, bos_token_id=0, eos_token_id=0))
    original = NviumForCausalLM.from_pretrained(folder)
    model = retrofitted(original, [1, 2, 4])
    model.config.default_sampling = "original"
    warm = SamplingParams(seed=3, max_tokens=12, ignore_eos=True)
    found = Engine(model, EngineConfig(max_drafts=max_drafts)).generate(PROMPTS, warm)
    dense = Engine(original).generate(PROMPTS, replace(warm, sampling="original"))
    assert [each.token_ids for each in found] == [each.token_ids for each in dense]
    engine = Engine(model, EngineConfig(max_drafts=max_drafts))
    greedy = engine.generate(PROMPTS, replace(warm, temperature=0.0))
    assert (engine.scheduler.drafts.num_drafted > 0) == (max_drafts > 0)
    for prompt, completion in zip(PROMPTS, greedy, strict=True):
        how = {"do_sample": False, "max_new_tokens": 12, "min_new_tokens": 12, "eos_token_id": 49}
        transformers = LlamaForCausalLM.from_pretrained(folder).generate(torch.tensor([prompt]), **how)
        assert completion.token_ids == transformers[0, len(prompt) :].tolist()


def test_the_models_default_sampling_applies_unless_the_request_sets_it():
    model = agreeing_model()
    plain, original = SamplingParams(seed=1, max_tokens=20), replace(LONG, seed=1, max_tokens=20, ignore_eos=False)
    exits = Engine(model).generate([PROMPTS[0]], plain)[0].token_ids
    model.config.default_sampling = "original"
    assert Engine(model).generate([PROMPTS[0]], plain)[0].token_ids == expected(model, PROMPTS[0], original)
    assert Engine(model).generate([PROMPTS[0]], replace(plain, sampling="exits"))[0].token_ids == exits


def test_the_engines_default_sampling_overrides_the_models():
    model = agreeing_model()
    asked = replace(LONG, sampling=None)
    (found,) = Engine(model, EngineConfig(sampling="original")).generate(PROMPTS[:1], asked)
    assert found.token_ids == expected(model, PROMPTS[0], LONG)
    (found,) = Engine(model, EngineConfig(sampling="original")).generate(PROMPTS[:1], replace(asked, sampling="exits"))
    assert {1, 2} & {*found.exits}
    with pytest.raises(InvalidRequest, match=r"^sampling: must be one of exits, mixture, original"):
        EngineConfig(sampling="last")


NUM_DRAWS = 200_000


@pytest.mark.slow
def test_200000_races_follow_the_distribution():
    logits_V = torch.tensor([0.3, -1.0, 2.0, -4.0, 0.0, 1.2, -0.3, 0.9], dtype=torch.float64)
    uniforms = [reference.uniform(5, 0, row, 0, b"token") for row in range(NUM_DRAWS)]
    draws = columns([SamplingParams(sampling="original").draw()] * NUM_DRAWS)
    uniform_R = torch.tensor(uniforms, dtype=torch.float64)
    tokens_R = race(logits_V.expand(NUM_DRAWS, -1), draws, uniform_R, is_ranked=False)
    counts = Counter(tokens_R.tolist())
    observed = [counts[token] for token in range(len(logits_V))]
    assert chisquare(observed, (logits_V.softmax(-1) * NUM_DRAWS).tolist()).pvalue > 1e-3
