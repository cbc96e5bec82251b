"""Native calls compared with PyTorch's layers, and with themselves for other threads and batches."""

from collections import ChainMap
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nvium_core import Engine, EngineConfig, SamplingParams
from nvium_core.choices import Instructions
from nvium_core.engine.device.layers import LayersBackend
from nvium_core.engine.device.native.backend import MIN_TILED_ROWS, NativeBackend
from nvium_core.engine.device.paged_cache import PagedCache
from nvium_core.engine.sampling_params import ExitRule
from nvium_core.engine.schedule.sequence import Sequence
from nvium_core.engine.schedule.step import NO_TOKEN, SWEEP, TIED, WHOLE, Backend, Emission, Outcome, Rows, Run, Step
from tests.engine.automaton import Automaton
from tests.engine.device.native.calls import (
    ALL_ROWS,
    KINDS,
    assert_alike,
    cache_of,
    carry,
    native_rows_of,
    one_of_each_kind,
    rows_of,
    seat_sequences,
)
from tests.engine.test_exactness import MAKES, fields_of, rules
from tests.random_models import random_model
from tests.rounded import KINDS as KINDS_OF_BLOCKS
from tests.rounded import round_to

VOCAB_SIZE = 17
MODEL = random_model([1, 2, 3], vocab_size=VOCAB_SIZE)
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 0.06}
SHAPES: dict[str, dict[str, Any]] = {
    "queries that share keys": {"width": 64, "num_heads": 4, "num_key_heads": 2},
    "heads of less than a vector": {"width": 24, "num_heads": 3, "num_key_heads": 3},
    "heads of several vectors": {"width": 160, "num_heads": 2, "num_key_heads": 1},
    "heads with biases": {"width": 48, "num_heads": 4, "num_key_heads": 2, "qkv_bias": True},
    "windows": {"width": 64, "windows": [9, None, 1]},
}
SHAPES |= {str(make): {"width": 64} | fields_of(make, 3) for make in MAKES if "norms_loops" not in make}

penalties = {"presence_penalty": st.sampled_from([0.0, 1.0]), "frequency_penalty": st.sampled_from([0.0, -0.5])}
penalties["repetition_penalty"] = st.sampled_from([1.0, 1.5])
changes = st.fixed_dictionaries(penalties | {"logit_bias": st.sampled_from([{}, {3: 2.0, 9: -100.0}])})
endings: st.SearchStrategy[dict[str, Any]] = st.just({}) | st.just({"min_tokens": 2, "stop_token_ids": (1, 2, 3)})
endings |= rules.map(lambda rule: {"constraint": Automaton(rule)})
scoring = st.sampled_from([{}, {"logprobs": 0}, {"logprobs": 3, "prompt_logprobs": True}, {"probabilities": True}])
truncated = {"top_k": st.sampled_from([0, 0, 4]), "top_p": st.sampled_from([1.0, 0.7])}
truncation = st.fixed_dictionaries(truncated | {"min_p": st.sampled_from([0.0, 0.03])})
parts = st.sampled_from(KINDS[:6]), st.just({}) | changes, endings, scoring, st.just({}) | truncation
wishes = st.tuples(*parts).map(lambda parts: SamplingParams(max_tokens=8, **ChainMap(*parts)))
requests = st.tuples(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=40), wishes)


def take(sequence: Sequence, outcome: Outcome) -> bool:
    """Apply the outcome; return whether the sequence continues."""
    sequence.filled, sequence.log_reached = list(outcome.filled), outcome.log_reached
    sequence.num_scored += len(outcome.scores)
    for emission in outcome.emissions:
        if emission.token_id == NO_TOKEN:
            return False
        sequence.verify(emission.token_id)
    return sequence.num_tokens < sequence.max_length


def pending(sequence: Sequence, block: int) -> range:
    return range(sequence.filled[block], sequence.filled[block - 1] if block else sequence.num_tokens)


class Twins:
    """The layers and each build of the kernels, with a cache each. They run Steps of the same sequences."""

    def __init__(self, model: Any, builds: list[Instructions], asked: Any, **pages: int) -> None:
        self.plain, *self.caches = (cache_of(model, **pages) for _ in range(1 + len(builds)))
        self.layers = LayersBackend(model, self.plain)
        made = zip(self.caches, builds, strict=True)
        self.natives = [
            NativeBackend(model, cache, EngineConfig(max_sequences=8, instructions=build)) for cache, build in made
        ]
        self.sequences = seat_sequences(asked, self.plain)
        self.living = list(self.sequences)

    def run(self, step: Step, max_rows: int = ALL_ROWS) -> list[Outcome]:
        """Check that the outcomes are alike, and return them."""
        expected = self.layers.run(step, max_rows)
        for found in [native.run(step, max_rows) for native in self.natives]:
            assert_alike(found.outcomes, expected.outcomes, 1e-10)
            assert [each[:3] for each in found.reports] == [each[:3] for each in expected.reports]
        return expected.outcomes

    def advance(self, step: Step, max_rows: int = ALL_ROWS) -> None:
        """Run the Step and apply its outcomes."""
        for run, outcome in zip(step.runs, self.run(step, max_rows), strict=True):
            if not take(run.sequence, outcome):
                self.living.remove(run.sequence)

    def check_rows(self) -> None:
        expected = rows_of(self.plain, self.sequences)
        for cache in self.caches:
            for some, others in zip(native_rows_of(cache, self.sequences), expected, strict=True):
                torch.testing.assert_close(some, others, rtol=0, atol=1e-10)


@settings(max_examples=60)
@given(st.lists(requests, min_size=1, max_size=4), st.sampled_from([4, 16]), st.data())
def test_steps_on_any_staircase_equal_those_of_the_layers(builds, asked, page_size, data):
    twins = Twins(MODEL, builds, asked, num_pages=256 // page_size, page_size=page_size)
    living = twins.living
    for _ in range(20):
        block = data.draw(st.sampled_from([b for b in range(3) if any(pending(s, b) for s in living)]))
        waiting = [sequence for sequence in living if pending(sequence, block)]
        chosen = data.draw(st.lists(st.sampled_from(waiting), min_size=1, unique_by=id))
        ends = [data.draw(st.integers(pending(s, block).start + 1, pending(s, block).stop)) for s in chosen]
        blocks = range(block, data.draw(st.integers(block + 1, 3)))
        policy = data.draw(st.sampled_from([WHOLE, SWEEP]))
        step = Step(blocks, [Run(*each) for each in zip(chosen, ends, strict=True)], policy)
        twins.advance(step, data.draw(st.integers(1, 40)))
        if not living:
            break
    twins.check_rows()


TIED_MODEL = random_model([2, 4, 6], num_loops=3, layer_norms="both", norms_loops=True, router="linear")


@settings(max_examples=60)
@given(st.lists(requests, min_size=1, max_size=4), st.data())
def test_tied_steps_on_any_staircase_equal_those_of_the_layers(builds, asked, data):
    twins = Twins(TIED_MODEL, builds, asked)
    for _ in range(30):
        chosen = data.draw(st.lists(st.sampled_from(twins.living), min_size=1, unique_by=id))
        ends = [data.draw(st.integers(s.filled[-1] + 1, s.num_tokens)) for s in chosen]
        twins.advance(Step(range(3), [Run(*each) for each in zip(chosen, ends, strict=True)], TIED))
        if not twins.living:
            break
    twins.check_rows()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", SHAPES)
def test_models_of_other_shapes_and_precisions_equal_the_layers(instructions, dtype, shape):
    # Norms after attention and MLP enlarge what PyTorch's operators have rounded to bfloat16.
    factor = 4 if dtype == torch.bfloat16 and "layer_norms" in SHAPES[shape] else 1
    model = random_model([1, 2, 3], dtype=dtype, spread=0.5, **SHAPES[shape])
    assert_equal_to_layers(model, instructions, tolerance=factor * TOLERANCE[dtype])


@pytest.mark.parametrize("windows", [[None] * 3, [300, None, 256]])
def test_contexts_of_several_blocks_of_keys_equal_the_layers(instructions, windows):
    model = random_model([1, 2, 3], width=64, num_heads=4, num_key_heads=2, context=700, windows=windows)
    caches = [cache_of(model, num_pages=44, page_size=16) for _ in range(2)]
    native = NativeBackend(model, caches[1], EngineConfig(max_sequences=1, instructions=instructions))
    asked = [([7 * t % VOCAB_SIZE for t in range(690)], SamplingParams())]
    plain_sequences, sequences = (seat_sequences(asked, cache) for cache in caches)
    assert_alike(carry(native, sequences, 250), carry(LayersBackend(model, caches[0]), plain_sequences, 250), 1e-10)
    for some, others in zip(native_rows_of(caches[1], sequences), rows_of(caches[0], plain_sequences), strict=True):
        torch.testing.assert_close(some, others, rtol=0, atol=1e-10)


def test_the_last_layer_leaves_out_rows_whose_states_are_not_read(instructions):
    model = random_model([1, 2, 3])
    cache = cache_of(model)
    cache.states_NSD.fill_(torch.nan)
    native = NativeBackend(model, cache, EngineConfig(max_sequences=2, instructions=instructions))
    sequences = seat_sequences([([1, 2, 3], SamplingParams())], cache)
    carry(native, sequences)
    states = cache.states_NSD[:, cache.slots([Rows(sequences[0], range(3))])]
    assert states.isnan().all(-1).tolist() == [[False] * 3, [False] * 3, [True, True, False]]


@pytest.mark.parametrize("without", [[0], [0, 1]])
def test_exits_without_routers_equal_the_layers(instructions, without):
    model = random_model([1, 2, 3])
    for number in without:
        model.exits[number].router = None
    assert_equal_to_layers(model, instructions)


@pytest.mark.parametrize("kind", KINDS_OF_BLOCKS)
def test_quantized_weights_equal_the_dequantized_layers(instructions, kind):
    model = random_model([1, 2, 3], dtype=torch.float32, width=256, vocab_size=50, spread=0.5)
    round_to(model, kind)
    # Inputs that differ in the last bits may round to neighbours, which are 1/32,639 of a group's largest number apart.
    assert_equal_to_layers(model, instructions, tolerance=1e-3)


@pytest.mark.parametrize("precision", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "Q4_K", "heads of less than a vector", "heads with biases"])
def test_a_cache_of_another_precision_equals_that_of_the_layers(instructions, kind, precision):
    """Keys that differ in the last bits may round to neighbours, so only keys, values and states are compared."""
    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
    shape = {"width": 256, "vocab_size": 50} if kind == "Q4_K" else SHAPES.get(kind, {})
    model = random_model([1, 2, 3], dtype=dtype, spread=0.5, **shape)
    if kind == "Q4_K":
        round_to(model, kind)
    tolerance = max(TOLERANCE[dtype], {"float32": 1e-3, "float16": 4e-3, "bfloat16": 0.03}[precision])
    assert_equal_to_layers(model, instructions, tolerance=tolerance, precision=precision)


@pytest.mark.parametrize("kind", ["float32", "float32 with weights of 16 bits", "bfloat16"])
@pytest.mark.parametrize("width", [64, 96, 80])
def test_tiles_multiply_like_the_layers(instructions, kind, width):
    """A width of 80 does not fill tiles, so none are used."""
    heads = {"num_heads": width // 16, "num_key_heads": width // 16}
    model = random_model([1, 2, 3], dtype=torch.float32, width=width, vocab_size=50, spread=0.5, **heads)
    if "16" in kind:
        model.bfloat16()
    if "float32" in kind:
        model.float()
    assert_equal_to_layers(model, instructions, is_tiled=True)


@pytest.mark.parametrize("kind", ["bfloat16", "Q4_K"])
def test_tiles_are_used_from_32_rows_of_all_sequences_on(instructions, kind):
    """Each sequence has one row. Tiles round rows differently, so results differ where they are used."""
    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
    model = random_model([1, 2, 3], dtype=dtype, width=256, vocab_size=50, spread=0.5)
    if kind in KINDS_OF_BLOCKS:
        round_to(model, kind)
    for num_rows in (MIN_TILED_ROWS - 1, MIN_TILED_ROWS):
        found = []
        for is_deterministic in (True, False):
            cache = cache_of(model)
            config = EngineConfig(max_sequences=64, deterministic=is_deterministic, instructions=instructions)
            native = NativeBackend(model, cache, config)
            sequences = seat_sequences([([token], SamplingParams()) for token in range(num_rows)], cache)
            carry(native, sequences)
            found.append(rows_of(cache, sequences)[-1])
        if not native._has_tiles:
            pytest.skip("no AMX tiles here")
        assert torch.equal(*found) == (num_rows < MIN_TILED_ROWS)
        torch.testing.assert_close(*found, rtol=0, atol=0.2 if kind == "bfloat16" else 1e-3)


def tiled(native: NativeBackend) -> NativeBackend:
    """Use tiles for every row."""
    if not native._has_tiles:
        pytest.skip("no AMX tiles here")
    native._call.min_tiled_rows = 0
    return native


def assert_equal_to_layers(
    model: Any, instructions: Instructions, *, is_tiled: bool = False, tolerance: float = 0, precision: Any = "auto"
) -> None:
    """In bfloat16 compare only keys, values and states: tokens depend on rounding."""
    plain, cache = (cache_of(model, precision=precision) for _ in range(2))
    native = NativeBackend(model, cache, EngineConfig(max_sequences=8, deterministic=True, instructions=instructions))
    native = tiled(native) if is_tiled else native
    ways: list[tuple[Backend, PagedCache]] = [(LayersBackend(model, plain), plain), (native, cache)]
    sequences = [one_of_each_kind(own, model.config.vocab_size) for _, own in ways]
    expected, found = (carry(backend, own, 40) for (backend, _), own in zip(ways, sequences, strict=True))
    dtype = model.lm_head.weight.dtype
    tolerance = tolerance or TOLERANCE[dtype]
    for some, others in zip(native_rows_of(cache, sequences[1]), rows_of(plain, sequences[0]), strict=True):
        torch.testing.assert_close(some, others, rtol=0, atol=tolerance)
    if dtype != torch.bfloat16 and precision == "auto":
        assert_alike(found, expected, tolerance)


@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {"logprobs": 2, "prompt_logprobs": True}])
def test_more_outputs_than_the_head_multiplies_at_once_and_scores_of_nan_are_those_of_the_layers(settings):
    model, found = random_model([1, 2, 3], vocab_size=VOCAB_SIZE), []
    model.model.embed_tokens.weight.data[5] = torch.nan if "logprobs" in settings else 1
    for make in (LayersBackend, partial(NativeBackend, config=EngineConfig(max_sequences=51))):
        cache = cache_of(model)
        prompts = [([3, 5, token], SamplingParams(**settings)) for token in range(VOCAB_SIZE)] * 3
        outcomes = carry(make(model, cache), seat_sequences(prompts, cache), 250)
        scored = [log for one in outcomes for score in one.scores for log in (score.logprob, *dict(score.top).values())]
        found.append([*(emission.token_id for one in outcomes for emission in one.emissions), *scored])
    assert found[0] == pytest.approx(found[1], nan_ok=True)


KINDS_OF_MODELS = [*TOLERANCE, "float32 in tiles", "bfloat16 in tiles", "Q4_K in tiles", "Q4_K", "Q6_K", "Q8_0"]
CACHES = (torch.float32, "bfloat16"), (torch.float32, "float16"), (torch.bfloat16, "float32"), ("Q8_0", "float16")


@pytest.mark.parametrize(("kind", "precision"), [*((kind, "auto") for kind in KINDS_OF_MODELS), *CACHES])
def test_results_do_not_depend_on_threads_the_batch_or_old_contents_of_pages(instructions, kind, precision):
    stored = str(kind).removesuffix(" in tiles")
    is_tiled = stored != str(kind)
    dtype = torch.bfloat16 if kind == "bfloat16 in tiles" else torch.float32 if isinstance(kind, str) else kind
    model = random_model([1, 2, 3], dtype=dtype, width=256 if stored in KINDS_OF_BLOCKS else 64)
    if stored in KINDS_OF_BLOCKS:
        round_to(model, stored)
    found = []
    for num_threads, most, is_alone in ((1, 40, False), (2, 7, False), (3, 40, False), (1, 1, True)):
        cache = cache_of(model, precision=precision)
        for tensor in (cache.keys, cache.values, cache.states_NSD):
            tensor.fill_(torch.nan if is_alone else 0)
        native = NativeBackend(
            model, cache, EngineConfig(max_sequences=8, deterministic=True, instructions=instructions)
        )
        native = tiled(native) if is_tiled else native
        native.num_threads = num_threads
        sequences = one_of_each_kind(cache, VOCAB_SIZE)
        parts = [[sequence] for sequence in sequences] if is_alone else [sequences]
        outcomes = [outcome for part in parts for outcome in carry(native, part, most)]
        found.append((outcomes, native_rows_of(cache, sequences)))
    for outcomes, rows in found[1:]:
        assert outcomes == found[0][0]
        assert all(torch.equal(some, others) for some, others in zip(rows, found[0][1], strict=True))


kinds = st.tuples(st.sampled_from(KINDS), st.just({}) | changes)


@settings(max_examples=20)
@given(st.lists(kinds, min_size=1, max_size=4), st.integers(2, 9), st.sampled_from([WHOLE, SWEEP]))
def test_a_call_of_several_tokens_equals_as_many_calls(builds, kinds, limit, policy):
    params = [SamplingParams(**kind, **changed, max_tokens=2 * limit) for kind, changed in kinds]
    asked = [([n, 2, 7], replace(each, stop_token_ids=(3, 5)[:n])) for n, each in enumerate(params)]
    twins = Twins(MODEL, builds, asked)
    sequences = twins.sequences
    for _ in range(2):
        runs = [Run(sequence, sequence.num_tokens) for sequence in sequences]
        step = Step(range(3), runs, policy, limit, seconds=60.0)
        found = [native.run(step, ALL_ROWS).outcomes for native in twins.natives]
        emissions: list[list[Emission]] = [[] for _ in sequences]
        for _ in found[0][0].emissions:
            runs = [Run(sequence, sequence.num_tokens) for sequence in sequences]
            for number, outcome in enumerate(twins.layers.run(Step(range(3), runs, policy), ALL_ROWS).outcomes):
                take(sequences[number], outcome)
                emissions[number] += outcome.emissions
        expected = [Outcome(s.filled, 0.0, own) for s, own in zip(sequences, emissions, strict=True)]
        for outcomes in found:
            assert_alike(outcomes, expected, 1e-10)
        has_stopped = any(s.token_ids[-1] in s.stop_token_ids for s in sequences)
        assert len(emissions[0]) == limit or has_stopped
    twins.check_rows()


@pytest.mark.parametrize("num_right", [0, 2, 5])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_are_accepted_up_to_the_first_wrong_one(builds, num_right, temperature):
    params = SamplingParams(max_tokens=9, seed=0, sampling="original", temperature=temperature, ignore_eos=True)
    (answer,) = Engine(MODEL).generate([[1, 2, 3]], params)
    right = answer.token_ids
    drafts = [*right[:num_right], *((token + 1) % VOCAB_SIZE for token in right[num_right:5])]
    twins = Twins(MODEL, builds, [([1, 2, 3], params)])
    (sequence,) = twins.sequences
    assert sequence.draw.rule == ExitRule.ORIGINAL
    sequence.append_drafts(drafts)
    (outcome,) = twins.run(Step(range(3), [Run(sequence, sequence.num_tokens)]))
    assert [emission.token_id for emission in outcome.emissions] == right[: num_right + 1]


@pytest.mark.parametrize("broken", ["exits.0.router.head.weight", "exits.1.norm.weight", "lm_head.weight"])
def test_weights_that_are_not_finite_yield_no_token(builds, broken):
    model = random_model([1, 2, 3])
    with torch.no_grad():
        model.get_parameter(broken)[0] = torch.nan
    twins = Twins(model, builds, [([1, 2, 3], SamplingParams(**kind)) for kind in KINDS])
    outcomes = twins.run(Step(range(3), [Run(sequence, 3) for sequence in twins.sequences]))
    assert any(outcome.emissions[0].token_id == NO_TOKEN for outcome in outcomes)
