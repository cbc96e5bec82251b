"""Blocks over fixed buffers against the model's own layers."""

from typing import cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nvium_core import SamplingParams
from nvium_core.engine.device.attention import in_place, power_of_two
from nvium_core.engine.device.graphs import GraphsBackend
from nvium_core.engine.device.graphs.inputs import MAX_ROWS
from nvium_core.engine.schedule.scheduler import MAX_SHORT_RUN
from nvium_core.engine.schedule.sequence import Sequence
from nvium_core.engine.schedule.step import Run
from nvium_core.model.llama import Layer
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
        for rows in (range(12), range(12, 20)):
            cached.carry(0, sequences, [rows, range(3)])
    slots = [s.pages[t // 16] * 16 + t % 16 for s in sequences for t in range(len(s.token_ids))]
    assert torch.equal(clean.cache.states_NSD[0, slots], dirty.cache.states_NSD[0, slots])


def test_a_step_that_is_run_again_leaves_the_same() -> None:
    model = random_model([1, 2])
    sequences = sequences_of([5, 20], model.config.vocab_size)
    once, twice = Cached(model, has_graphs=True), Cached(model, has_graphs=True)
    for block in range(2):
        for cached, times in ((once, 1), (twice, 2)):
            for _ in range(times):
                cached.carry(block, sequences, [range(5), range(4, 20)])
    assert all(torch.equal(some, others) for some, others in zip(once.kept, twice.kept, strict=True))


def test_two_engines_of_one_model_read_the_same_packed_weights() -> None:
    """A graph of the first has their addresses."""
    model = random_model([1, 3], width=64)
    layer = cast(Layer, model.model.layers[0])

    def addresses() -> list[int]:
        assert layer.self_attn.qkv is not None
        assert layer.mlp.gate_up is not None
        held = (layer.self_attn.qkv.weight, layer.mlp.gate_up.weight, layer.self_attn.v_proj.weight)
        return [tensor.data_ptr() for tensor in held]

    Cached(model, has_graphs=True)
    first = addresses()
    Cached(model, has_graphs=True)
    assert addresses() == first
    model.to(torch.float32)
    Cached(model, has_graphs=True)
    assert layer.self_attn.qkv is not None
    assert layer.self_attn.qkv.weight.dtype == torch.float32
    assert layer.mlp.gate_up is not None
    assert layer.mlp.gate_up.holds(layer.mlp.gate_proj, layer.mlp.up_proj)


def test_buffers_have_room_for_so_many_rows_and_keys() -> None:
    backend = Cached(random_model([1], context=8192), has_graphs=True, page_size=512).graphs
    assert backend.inputs.fits(MAX_ROWS, 1) is False
    assert backend.inputs.fits(128, 1)
    assert backend.inputs.fits(8, 6000)
    assert not backend.inputs.fits(9, 6000)
    backend = GraphsBackend(backend.model, backend.cache, attention=in_place)
    assert backend.inputs.fits(MAX_ROWS, 8192)
    assert not backend.inputs.fits(MAX_ROWS + 1, 1)


def test_a_step_is_split_so_that_nobody_rides_a_prompt_through_the_layers() -> None:
    model = random_model([1], context=512)
    backend = Cached(model, has_graphs=True, page_size=16).graphs
    prompt, *others = sequences_of([200, 30, 5, 17], model.config.vocab_size)
    long = Run(prompt, range(100, 200), reaches_front=True)
    short = [Run(sequence, range(sequence.num_tokens - 1, sequence.num_tokens), True) for sequence in others]
    assert backend.parts([long, *short]) == [sorted(short, key=lambda run: run.rows.stop)]
    assert backend.parts(short) == [short]
    assert backend.parts([long]) == []


@given(st.lists(st.tuples(st.integers(1, 380), st.integers(1, 80)), min_size=1, max_size=40))
def test_parts_of_a_step_fit_and_leave_out_what_does_not_fit_alone(lengths: list[tuple[int, int]]) -> None:
    runs = []
    for number, (length, rows) in enumerate(lengths):
        sequence = Sequence(str(number), [0] * length, SamplingParams(), seed=0, num_blocks=1, arrival=0)
        runs.append(Run(sequence, range(max(0, length - rows), length), reaches_front=True))
    parts = LONG_CONTEXT.parts(runs)
    for part in parts:
        assert LONG_CONTEXT.inputs.fits(sum(len(run.rows) for run in part), max(run.rows.stop for run in part))
    there = [run for part in parts for run in part]
    assert len(there) == len({run.sequence for run in there})
    left = [run for run in runs if run not in there]
    assert all(
        len(run.rows) > MAX_SHORT_RUN or not LONG_CONTEXT.inputs.fits(len(run.rows), run.rows.stop) for run in left
    )


LONG_CONTEXT = Cached(random_model([1], context=380), has_graphs=True).graphs


@pytest.mark.parametrize(("number", "power"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (33, 64), (64, 64)])
def test_rows_are_filled_up_to_a_power_of_two(number: int, power: int) -> None:
    assert power_of_two(number) == power
