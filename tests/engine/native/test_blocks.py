"""A block in one native call against the model's own layers, and against itself in other company."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nvium_core import NviumForCausalLM
from nvium_core.engine import native
from nvium_core.engine.attention import PagedAttention
from nvium_core.engine.blocks import PlainBlocks
from nvium_core.engine.scheduler import Run, Step
from nvium_core.engine.sequence import Sequence
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
SHAPES = {
    "queries that share keys": {"width": 64, "num_heads": 4, "num_key_heads": 2},
    "heads of less than a vector": {"width": 24, "num_heads": 3, "num_key_heads": 3},
    "heads of several vectors": {"width": 160, "num_heads": 2, "num_key_heads": 1},
}

pytestmark = pytest.mark.skipif(native.native_library() is None, reason="no C++ compiler here")


@dataclass
class Cached:
    """A model's blocks with a cache of their own."""

    model: NviumForCausalLM
    is_native: bool

    def __post_init__(self) -> None:
        like = self.model.lm_head.weight
        self.attention = PagedAttention(self.model.config, num_pages=NUM_PAGES, page_size=PAGE_SIZE, like=like)
        self.states_2SD = like.new_zeros(2, self.attention.num_slots, self.model.config.hidden_size)
        blocks = native.NativeBlocks if self.is_native else PlainBlocks
        self.blocks = blocks(self.model, self.attention, self.states_2SD)

    @torch.inference_mode()
    def carry(self, block: int, sequences: list[Sequence], rows: list[range]) -> None:
        runs = [Run(sequence, own, reaches_front=False) for sequence, own in zip(sequences, rows, strict=True)]
        self.blocks.carry(Step(block, [run for run in runs if run.rows]))

    @property
    def kept(self) -> list[Tensor]:
        return [self.attention.keys, self.attention.values, self.states_2SD]


def plain_and_native(model: NviumForCausalLM) -> tuple[Cached, Cached]:
    return Cached(model, is_native=False), Cached(model, is_native=True)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_keys_and_values_are_those_of_the_layers(dtype: torch.dtype, shape: str) -> None:
    model = random_model([1, 3], dtype=dtype, spread=0.5, **SHAPES[shape])
    sequences = sequences_of([1, 17, 40], model.config.vocab_size)
    plain, fast = plain_and_native(model)
    carry_five_by_five(sequences, [plain, fast])
    assert_alike(fast, plain, TOLERANCE[dtype])


@settings(max_examples=30)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=4), st.data())
def test_a_staircase_of_any_shape_is_carried_as_the_layers_carry_it(lengths: list[int], data: st.DataObject) -> None:
    model = random_model([1, 2, 4], context=64)
    sequences = sequences_of(lengths, model.config.vocab_size)
    plain, fast = plain_and_native(model)
    carry_a_staircase(sequences, [plain, fast], data)
    assert_alike(fast, plain, 1e-11)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_no_bit_of_a_row_depends_on_its_company(dtype: torch.dtype) -> None:
    model = random_model([2], dtype=dtype, width=64)
    sequences = sequences_of([9, 30, 3, 22], model.config.vocab_size)
    together, alone = Cached(model, is_native=True), Cached(model, is_native=True)
    together.carry(0, sequences, [range(len(sequence.token_ids)) for sequence in sequences])
    for sequence in sequences:
        for t in range(len(sequence.token_ids)):
            alone.carry(0, [sequence], [range(t, t + 1)])
    for some, others in zip(together.kept, alone.kept, strict=True):
        assert torch.equal(some, others)


def test_no_bit_depends_on_the_number_of_threads() -> None:
    model = random_model([2], dtype=torch.float32, width=64)
    sequences = sequences_of([9, 30], model.config.vocab_size)
    rows, kept, threads = [range(9), range(30)], [], torch.get_num_threads()
    try:
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            cached = Cached(model, is_native=True)
            cached.carry(0, sequences, rows)
            kept.append(cached.states_2SD)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(kept[0], kept[1])
    assert torch.equal(kept[0], kept[2])


@pytest.mark.parametrize("is_native", [False, True])
def test_a_step_that_is_run_again_leaves_the_same(is_native: bool) -> None:
    model = random_model([1, 2])
    sequences = sequences_of([5, 20], model.config.vocab_size)
    once, twice = Cached(model, is_native=is_native), Cached(model, is_native=is_native)
    for block in range(2):
        for cached, times in ((once, 1), (twice, 2)):
            for _ in range(times):
                cached.carry(block, sequences, [range(5), range(20)])
    assert all(torch.equal(some, others) for some, others in zip(once.kept, twice.kept, strict=True))


def test_what_a_sequence_leaves_in_its_pages_does_not_reach_whoever_has_them_next() -> None:
    model = random_model([1], dtype=torch.float32)
    (sequence,) = sequences_of([20], model.config.vocab_size)
    clean, dirty = Cached(model, is_native=True), Cached(model, is_native=True)
    for tensor in dirty.kept:
        tensor.fill_(torch.nan)
    for cached in (clean, dirty):
        cached.carry(0, [sequence], [range(20)])
    slots = [sequence.pages[t // PAGE_SIZE] * PAGE_SIZE + t % PAGE_SIZE for t in range(20)]
    assert torch.equal(clean.states_2SD[1, slots], dirty.states_2SD[1, slots])


@pytest.mark.parametrize("field", [{"hidden_act": "gelu"}, {"attention_bias": True}, {"mlp_bias": True}])
def test_a_model_with_other_parts_is_left_to_its_layers(field: dict[str, object]) -> None:
    model = random_model([1])
    assert native.knows(model)
    for name, value in field.items():
        setattr(model.config, name, value)
    assert not native.knows(model)


def test_a_model_of_mixed_precision_is_left_to_its_layers() -> None:
    model = random_model([1, 2], dtype=torch.bfloat16)
    assert native.knows(model)
    model.model.layers[1].mlp.float()
    assert not native.knows(model)
