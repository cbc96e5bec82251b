"""Blocks over fixed buffers against the model's own layers."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nvium_core.engine.device.attention import power_of_two
from nvium_core.engine.device.graphs.inputs import MAX_ROWS
from nvium_core.engine.schedule.step import Run, Step
from tests.engine.cached_blocks import TOLERANCE, assert_alike, carry_a_staircase, carry_five_by_five, sequences_of
from tests.engine.device.graphs.engines import Cached
from tests.random_models import random_model


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_rows_keys_and_values_are_those_of_the_layers(dtype: torch.dtype) -> None:
    model = random_model([1, 3], dtype=dtype, spread=0.5, width=64)
    sequences = sequences_of([1, 17, 40], model.config.vocab_size)
    plain, graphs = Cached(model, has_graphs=False), Cached(model, has_graphs=True)
    carry_five_by_five(sequences, [plain, graphs])
    assert_alike(graphs, plain, TOLERANCE[dtype])


@settings(max_examples=30)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=4), st.sampled_from([1, 7, 16]), st.data())
def test_a_staircase_of_any_shape_is_carried_as_the_layers_carry_it(
    lengths: list[int], page_size: int, data: st.DataObject
) -> None:
    if page_size == 1:
        lengths = [min(length, 6) for length in lengths]
    model = random_model([1, 2, 4], context=64)
    sequences = sequences_of(lengths, model.config.vocab_size, page_size)
    plain, graphs = Cached(model, has_graphs=False, page_size=page_size), Cached(model, True, page_size)
    carry_a_staircase(sequences, [plain, graphs], data)
    assert_alike(graphs, plain, 1e-11)


def test_what_a_sequence_leaves_in_its_pages_does_not_reach_whoever_has_them_next() -> None:
    model = random_model([1], dtype=torch.float32)
    sequences = sequences_of([20, 3], model.config.vocab_size)
    clean, dirty = Cached(model, has_graphs=True), Cached(model, has_graphs=True)
    for tensor in dirty.kept:
        tensor[:, : dirty.cache.null_slot] = torch.nan
    for cached in (clean, dirty):
        cached.carry(0, sequences, [range(20), range(3)])
    slots = [s.pages[t // 16] * 16 + t % 16 for s in sequences for t in range(len(s.token_ids))]
    assert torch.equal(clean.cache.states_2SD[1, slots], dirty.cache.states_2SD[1, slots])


def test_a_step_that_is_run_again_leaves_the_same() -> None:
    model = random_model([1, 2])
    sequences = sequences_of([5, 20], model.config.vocab_size)
    once, twice = Cached(model, has_graphs=True), Cached(model, has_graphs=True)
    for block in range(2):
        for cached, times in ((once, 1), (twice, 2)):
            for _ in range(times):
                cached.carry(block, sequences, [range(5), range(20)])
    assert all(torch.equal(some, others) for some, others in zip(once.kept, twice.kept, strict=True))


def test_a_step_that_there_is_no_room_for_is_left_to_the_layers() -> None:
    model = random_model([1], context=8192)
    backend = Cached(model, has_graphs=True, page_size=512).graphs
    (sequence,) = sequences_of([6000], model.config.vocab_size, 512)

    def suits(*rows: range) -> bool:
        return backend.suits(Step(0, [Run(sequence, own, reaches_front=False) for own in rows]))

    assert suits(range(MAX_ROWS))
    assert not suits(range(MAX_ROWS + 1))
    assert suits(range(5992, 6000))
    assert not suits(range(5991, 6000))


@pytest.mark.parametrize(("number", "power"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (33, 64), (64, 64)])
def test_rows_are_filled_up_to_a_power_of_two(number: int, power: int) -> None:
    assert power_of_two(number) == power
