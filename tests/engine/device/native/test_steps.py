"""Steps in one native call against the model's own layers and junctions, and against themselves in other company."""

import ctypes
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nvium_core import NviumForCausalLM, SamplingParams
from nvium_core.bench.shapes import force_routing
from nvium_core.choices import Quantization
from nvium_core.engine.device import native
from nvium_core.engine.device.junction import Junctions
from nvium_core.engine.device.layers.backend import LayersBackend
from nvium_core.engine.device.native import weights
from nvium_core.engine.device.native.fronts import NativeFronts
from nvium_core.engine.device.native.steps import NativeSteps
from nvium_core.engine.device.native.uniforms import Uniforms
from nvium_core.engine.device.paged_cache import PagedCache
from nvium_core.engine.schedule.kv_cache import slots
from nvium_core.engine.schedule.randomness import ROUTE, TOKEN, uniform
from nvium_core.engine.schedule.sequence import Sequence
from nvium_core.engine.schedule.step import Run, Step, StepResult
from nvium_core.model.exits import Exit
from nvium_core.model.quantized import quantize_model
from tests.engine.cached_blocks import (
    NUM_PAGES,
    TOLERANCE,
    assert_alike,
    carry_a_staircase,
    carry_five_by_five,
    sequences_of,
)
from tests.random_models import random_model

PAGE_SIZE = 16
LONG = 256
SHAPES = {
    "queries that share keys": {"width": 64, "num_heads": 4, "num_key_heads": 2},
    "heads of less than a vector": {"width": 24, "num_heads": 3, "num_key_heads": 3},
    "heads of several vectors": {"width": 160, "num_heads": 2, "num_key_heads": 1},
    "heads with biases": {"width": 48, "num_heads": 4, "num_key_heads": 2, "qkv_bias": True},
    "normed heads, and a layer without rotary": {"width": 64, "qk_norm": True, "no_rope_layers": [1]},
}


@dataclass
class Cached:
    """A model's blocks with a cache of their own."""

    model: NviumForCausalLM
    library: ctypes.CDLL | None = None
    """Whose native calls are used; None is the layers."""

    def __post_init__(self) -> None:
        like = self.model.lm_head.weight
        self.cache = PagedCache(self.model.config, num_pages=NUM_PAGES, page_size=PAGE_SIZE, like=like)
        self.layers = LayersBackend(self.model, self.cache)
        self.junctions = Junctions(self.model, self.layers, max_sequences=8)
        self.steps = NativeSteps(self.library, self.model, self.cache, max_sequences=8) if self.library else None

    @torch.inference_mode()
    def carry(self, block: int, sequences: list[Sequence], rows: list[range]) -> None:
        runs = [Run(sequence, own, reaches_front=False) for sequence, own in zip(sequences, rows, strict=True)]
        step = Step(block, [run for run in runs if run.rows])
        if self.steps:
            assert [result.decisions for result in self.steps.run(step)] == [{}]
        else:
            self.layers.run(step)

    @torch.inference_mode()
    def run(self, step: Step) -> list[StepResult]:
        """The Step and those that follow it, as they are meant to be run."""
        if self.steps:
            return self.steps.run(step)
        self.layers.run(step)
        fronts = [run.sequence for run in step.runs if run.reaches_front]
        own_slots = [slot for s in fronts for slot in slots(s, range(s.num_tokens - 1, s.num_tokens), PAGE_SIZE)]
        reached = {sequence: sequence.log_reached for sequence in fronts}
        decisions = self.junctions.decide(step.block, reached, own_slots) if fronts else {}
        goes_on = any(decision.token_id is None for decision in decisions.values())
        if step.following is None or not (goes_on or step.goes_on_anyway):
            return [StepResult(step, decisions)]
        following = step.following if goes_on else asking_nobody(step.following)
        return [StepResult(step, decisions), *self.run(following)]

    @property
    def kept(self) -> list[Tensor]:
        return [self.cache.keys, self.cache.values, self.cache.states_NSD]


def asking_nobody(step: Step) -> Step:
    following = None if step.following is None else asking_nobody(step.following)
    return Step(step.block, [run._replace(reaches_front=False) for run in step.runs], following, step.goes_on_anyway)


def plain_and_native(model: NviumForCausalLM, library: ctypes.CDLL) -> tuple[Cached, Cached]:
    return Cached(model), Cached(model, library)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_keys_and_values_are_those_of_the_layers(library: ctypes.CDLL, dtype: torch.dtype, shape: str) -> None:
    model = random_model([1, 3], dtype=dtype, spread=0.5, **SHAPES[shape])
    sequences = sequences_of([1, 17, 40], model.config.vocab_size)
    plain, fast = plain_and_native(model, library)
    carry_five_by_five(sequences, [plain, fast])
    assert_alike(fast, plain, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_prompt_that_comes_whole_is_carried_as_the_layers_carry_it(library: ctypes.CDLL, dtype: torch.dtype) -> None:
    model = random_model([1, 2], dtype=dtype, width=64, context=LONG, spread=0.5)
    sequences = sequences_of([LONG], model.config.vocab_size)
    plain, fast = plain_and_native(model, library)
    for cached in (plain, fast):
        for block in (0, 1):
            cached.carry(block, sequences, [range(LONG)])
    assert_alike(fast, plain, TOLERANCE[dtype])


@settings(max_examples=30)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=4), st.data())
def test_a_staircase_of_any_shape_is_carried_as_the_layers_carry_it(
    library: ctypes.CDLL, lengths: list[int], data: st.DataObject
) -> None:
    model = random_model([1, 2, 4], context=64)
    sequences = sequences_of(lengths, model.config.vocab_size)
    plain, fast = plain_and_native(model, library)
    carry_a_staircase(sequences, [plain, fast], data)
    assert_alike(fast, plain, 1e-11)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_no_bit_of_a_row_depends_on_its_company(library: ctypes.CDLL, dtype: torch.dtype) -> None:
    model = random_model([2], dtype=dtype, width=64)
    sequences = sequences_of([9, 30, 3, 22], model.config.vocab_size)
    together, alone = Cached(model, library), Cached(model, library)
    together.carry(0, sequences, [range(len(sequence.token_ids)) for sequence in sequences])
    for sequence in sequences:
        for t in range(len(sequence.token_ids)):
            alone.carry(0, [sequence], [range(t, t + 1)])
    for some, others in zip(together.kept, alone.kept, strict=True):
        assert torch.equal(some, others)


def test_no_bit_depends_on_the_number_of_threads(library: ctypes.CDLL) -> None:
    model = random_model([2], dtype=torch.float32, width=64)
    sequences = sequences_of([9, 30], model.config.vocab_size)
    rows, kept, threads = [range(9), range(30)], [], torch.get_num_threads()
    try:
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            cached = Cached(model, library)
            cached.carry(0, sequences, rows)
            kept.append(cached.cache.states_NSD)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(kept[0], kept[1])
    assert torch.equal(kept[0], kept[2])


@pytest.mark.parametrize("is_native", [False, True])
def test_a_step_that_is_run_again_leaves_the_same(widest_library: ctypes.CDLL, is_native: bool) -> None:
    model = random_model([1, 2])
    sequences = sequences_of([5, 20], model.config.vocab_size)
    library = widest_library if is_native else None
    once, twice = Cached(model, library), Cached(model, library)
    for block in range(2):
        for cached, times in ((once, 1), (twice, 2)):
            for _ in range(times):
                cached.carry(block, sequences, [range(5), range(20)])
    assert all(torch.equal(some, others) for some, others in zip(once.kept, twice.kept, strict=True))


def test_what_a_sequence_leaves_in_its_pages_does_not_reach_whoever_has_them_next(library: ctypes.CDLL) -> None:
    model = random_model([1], dtype=torch.float32)
    (sequence,) = sequences_of([20], model.config.vocab_size)
    clean, dirty = Cached(model, library), Cached(model, library)
    for tensor in dirty.kept:
        tensor.fill_(torch.nan)
    for cached in (clean, dirty):
        cached.carry(0, [sequence], [range(20)])
    slots = [sequence.pages[t // PAGE_SIZE] * PAGE_SIZE + t % PAGE_SIZE for t in range(20)]
    assert torch.equal(clean.cache.states_NSD[0, slots], dirty.cache.states_NSD[0, slots])


@pytest.mark.parametrize("config", [{"attention_bias": True}, {"mlp_bias": True}, {"hidden_act": "gelu"}])
def test_a_model_with_other_parts_is_left_to_its_layers(config: dict[str, Any]) -> None:
    model = random_model([1])
    assert native.knows(model)
    assert native.knows(random_model([1, 2], dtype=torch.float32, drafter_hidden_size=8))  # it drafts beside them
    assert not native.knows(NviumForCausalLM(type(model.config)(**(model.config.to_dict() | config))))


@pytest.mark.parametrize(
    "path", ["", "model", "model.layers.1.self_attn", "exits.0", "exits.0.router", "exits.1.adapter"]
)
def test_a_model_with_a_parameter_that_native_code_does_not_read_is_left_to_its_layers(path: str) -> None:
    model = random_model([1, 2])
    assert native.knows(model)
    extra = torch.nn.Parameter(torch.ones(4, dtype=torch.float64))
    model.get_submodule(path).register_parameter("scale_of_its_own", extra)
    assert not native.knows(model)


def test_a_model_of_mixed_precision_is_left_to_its_layers() -> None:
    model = random_model([1, 2], dtype=torch.bfloat16)
    assert native.knows(model)
    model.model.layers[1].mlp.float()
    assert not native.knows(model)


def drawing(length: int, seed: int, **wishes: Any) -> Sequence:
    """A sequence of two pages that draws."""
    params = SamplingParams(**wishes)
    sequence = Sequence(
        str(seed), [t % 7 for t in range(length)], params, seed=seed, num_blocks=3, arrival=0, choice=seed % 3
    )
    sequence.pages = [2 * (seed % 11), 2 * (seed % 11) + 1]
    sequence.seat = seed % 8
    return sequence


def assert_same(some: list[StepResult], others: list[StepResult]) -> None:
    assert [result.step.block for result in some] == [result.step.block for result in others]
    assert [result.num_asked for result in some] == [result.num_asked for result in others]
    ones, others_ = ends(some), ends(others)
    assert ones.keys() == others_.keys()
    for sequence, (block, token, log_exit, log_continue) in ones.items():
        assert (block, token) == others_[sequence][:2]
        assert (log_exit, log_continue) == pytest.approx(others_[sequence][2:], rel=1e-10)


def ends(results: list[StepResult]) -> dict[Sequence, tuple[int, int | None, float, float]]:
    """Of each front the block it was asked at last, what it emitted, and log w from where it stood before the first."""
    found: dict[Sequence, tuple[int, int | None, float, float]] = {}
    for result in results:
        for sequence, (token, log_exit, log_continue) in result.decisions.items():
            before = found[sequence][3] if sequence in found else 0.0
            found[sequence] = result.step.block, token, before + log_exit, before + log_continue
    return found


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.integers(1, 20), st.booleans()), min_size=1, max_size=6),
    st.integers(-(2**63), 2**63 - 12),
    st.sampled_from([0.4, 1.0, 1.7]),
    st.sampled_from([0.0, 0.1]),
    st.sampled_from([{}, {}, {"top_p": 0.9}, {"top_p": 0.5}, {"top_k": 3}, {"top_k": 5, "top_p": 0.7}]),
)
def test_fronts_are_answered_as_the_junction_answers_them(
    library: ctypes.CDLL,
    fronts: list[tuple[int, bool]],
    seed: int,
    temperature: float,
    min_p: float,
    kept: dict[str, Any],
) -> None:
    model = random_model([1, 2, 3])
    plain, fast = plain_and_native(model, library)
    sequences = [
        drawing(length, seed + i, temperature=temperature, min_p=min_p, **kept) for i, (length, _) in enumerate(fronts)
    ]
    for number, sequence in enumerate(sequences):
        sequence.pages = [3 * number, 3 * number + 1]
    for block in range(3):
        runs = [
            Run(sequence, range(length), reaches_front=reaches)
            for sequence, (length, reaches) in zip(sequences, fronts, strict=True)
        ]
        step = Step(block, runs)
        assert_same(fast.run(step), plain.run(step))
    assert_alike(fast, plain, 1e-11)


@pytest.mark.parametrize("goes_on_anyway", [False, True])
def test_a_lone_front_goes_on_in_the_same_call_until_it_speaks(library: ctypes.CDLL, goes_on_anyway: bool) -> None:
    model, lengths = random_model([1, 2, 3]), set()
    force_routing(model, (0.4, 0.3, 0.3))
    for seed in range(30):
        plain, fast = plain_and_native(model, library)
        sequence = drawing(18, seed)
        step: Step | None = None
        for block in (2, 1, 0):
            step = Step(block, [Run(sequence, range(18), reaches_front=True)], step, goes_on_anyway)
        assert step is not None
        natively, slowly = fast.run(step), plain.run(step)
        assert_same(natively, slowly)
        assert_alike(fast, plain, 1e-11)
        lengths.add((len(natively), sum(result.num_asked for result in natively)))
        assert all(result.seconds is not None and result.seconds > 0 for result in natively)
        assert all(result.is_complete for result in natively)
    assert lengths == ({(3, 1), (3, 2), (3, 3)} if goes_on_anyway else {(1, 1), (2, 2), (3, 3)})


@pytest.mark.parametrize("wish", [{"temperature": 0.0}, {"sampling": "mixture"}, {"presence_penalty": 1.0}])
def test_fronts_that_draw_otherwise_are_left_to_the_junction(library: ctypes.CDLL, wish: dict[str, Any]) -> None:
    _, fast = plain_and_native(random_model([1, 2]), library)
    plainly, otherwise = drawing(5, 1), drawing(5, 2, **wish)
    (result,) = fast.run(Step(0, [Run(s, range(5), reaches_front=True) for s in (plainly, otherwise)]))
    assert result.decisions.keys() == {plainly}
    following = Step(1, [Run(otherwise, range(5), reaches_front=True)])
    assert len(fast.run(Step(0, following.runs, following))) == 1


WHOLE = st.integers(-(2**63), 2**63 - 1)


@given(st.lists(st.tuples(WHOLE, WHOLE, st.integers(0, 2**40)), min_size=1, max_size=5), st.integers(1, 6))
def test_uniforms_are_python_s(library: ctypes.CDLL, keys: list[tuple[int, int, int]], num_blocks: int) -> None:
    written = []
    for each in (library, None):
        out = np.zeros((2 * num_blocks, 7))
        position_R = np.zeros(7, np.int64)
        uniforms = Uniforms(each, position_R, out)
        uniforms.key_R2[: len(keys)] = [key[:2] for key in keys]
        position_R[: len(keys)] = [key[2] for key in keys]
        uniforms.write(len(keys))
        assert not out[:, len(keys) :].any()
        written.append(out)
    natively, in_python = written
    assert (natively == in_python).all()
    assert in_python[num_blocks - 1, 0] == uniform(*keys[0], num_blocks - 1, TOKEN)
    assert in_python[-1, len(keys) - 1] == uniform(*keys[-1], num_blocks - 1, ROUTE)


def test_weights_that_bfloat16_holds_are_read_in_it_and_no_bit_changes(
    library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = random_model([1, 2], dtype=torch.bfloat16).float()
    sequences = [drawing(9, 1), drawing(4, 5)]
    step = Step(0, [Run(sequence, range(sequence.num_tokens), reaches_front=True) for sequence in sequences])
    narrow = Cached(model, library)
    monkeypatch.setattr(weights, "narrowed", lambda weight: weight)
    wide = Cached(model, library)
    assert narrow.run(step)[0].decisions == wide.run(step)[0].decisions
    assert all(torch.equal(some, others) for some, others in zip(narrow.kept, wide.kept, strict=True))


def test_the_head_is_stored_once(widest_library: ctypes.CDLL) -> None:
    exits = weights.Store(random_model([1, 2, 3]), widest_library.vector_bytes()).exits()
    assert len({exit_.array[-1] for exit_ in exits}) == 1


def test_a_matrix_is_narrowed_unless_that_loses_a_bit() -> None:
    matrix = torch.ones(3, 4)
    assert weights.narrowed(matrix).dtype == torch.bfloat16
    matrix[0, 0] = 1 + 2**-20
    assert weights.narrowed(matrix) is matrix
    assert weights.narrowed(torch.ones(3, 4, dtype=torch.float64)).dtype == torch.float64


@pytest.mark.parametrize("kind", ["q8", "q4"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_groups_are_read_as_the_weights_they_stand_for(
    library: ctypes.CDLL, kind: Quantization, dtype: torch.dtype
) -> None:
    model = random_model([1, 3], dtype=dtype, width=64, vocab_size=50, spread=0.5)
    quantize_model(model, kind)
    sequences = sequences_of([1, 17, 40], model.config.vocab_size)
    plain, fast = plain_and_native(model, library)
    carry_five_by_five(sequences, [plain, fast])
    assert_alike(fast, plain, TOLERANCE[dtype])
    x_RD = torch.randn(9, 64, dtype=dtype, generator=torch.Generator().manual_seed(1))
    exits = NativeFronts(library, model, fast.cache.states_NSD)
    for block, exit_ in enumerate(model.exits):
        logits_RV = model.lm_head(cast(Exit, exit_).adapter(x_RD))
        torch.testing.assert_close(exits.logits(block, x_RD), logits_RV, rtol=0, atol=10 * TOLERANCE[dtype])
        assert torch.equal(exits.logits(block, x_RD)[4:5], exits.logits(block, x_RD[4:5].clone()))


def test_groups_are_read_in_their_own_bytes(widest_library: ctypes.CDLL) -> None:
    model = random_model([1], dtype=torch.float32, width=64)
    quantize_model(model, "q4")
    pointers = weights.Store(model, widest_library.vector_bytes()).block(range(1))
    assert list(pointers.array[1:8:2]) == [4] * 4
