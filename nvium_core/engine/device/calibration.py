"""What a Step costs on this device: measured on an idle engine before it serves, or assumed until then."""

import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import product
from statistics import fmean, linear_regression, median

import torch

from nvium_core.engine.device.native.backend import NativeBackend
from nvium_core.engine.device.native.steps import MAX_RUN_ROWS
from nvium_core.engine.device.runner import Runner
from nvium_core.engine.params import SamplingParams
from nvium_core.engine.schedule.costs import Line, StepCosts
from nvium_core.engine.schedule.kv_cache import PagePool
from nvium_core.engine.schedule.sequence import Sequence
from nvium_core.engine.schedule.step import Run, Step
from nvium_core.model.config import NviumConfig

ROW_COUNTS = (1, 2, 4, 8, 12, 16, 24, 32, 64, 128, 256)
"""What is measured; in between and beyond, costs are taken to be linear."""

MAX_SPREAD_ROWS = 64
"""So many are of as many sequences as there are seats; more are of one, as a prompt's are."""

POSITION = 64
"""How long the sequences are that are measured, if the cache holds them."""

REPEATS, LONG_REPEATS = 5, 2
"""Of every Step, and of one with more rows. Each draws exits anew, which decides how often the head is computed."""

MAX_PASS_SEQUENCES, PASS_REPEATS = 64, 3
"""Of whole passes."""

PROMPT_ROWS = (64, 128, 256)
"""Rows of one sequence for which native calls and the layers are compared, while native calls win."""

PROMPT_REPEATS = 3

MANY_ROWS, THREAD_REPEATS = 16, 15
"""Rows, of as many sequences, that stand for many; turns for each number of threads."""

ASSUMED_ROWS = 32
"""Rows that cost as much as running a block at all does, until measured."""


def assumed_costs(config: NviumConfig) -> StepCosts:
    """Costs in proportion to the blocks' layers: their ratios are all that a schedule depends on."""
    layers = [float(len(block)) for block in config.blocks]
    return StepCosts.linear(layers, [cost / ASSUMED_ROWS for cost in layers])


def choose_path(runner: Runner, pool: PagePool, config: NviumConfig) -> None:
    """Let prompts run natively up to where the layers are faster, in the middle of the context."""
    backend = runner.backend
    if not isinstance(backend, NativeBackend) or backend.is_deterministic:
        return
    backend.max_native_rows = MAX_RUN_ROWS
    for num_rows in PROMPT_ROWS:
        ways = backend.max_native_rows, num_rows
        position = config.max_position_embeddings // 2
        sequences = stand_ins(num_rows, pool, config, max_sequences=1, position=position)
        if not sequences:
            return
        step = Step(0, [Run(sequence, rows, reaches_front=False) for sequence, rows in sequences.items()])
        times: dict[int, list[float]] = {way: [] for way in ways}
        for turn, way in product(range(PROMPT_REPEATS), ways):
            backend.max_native_rows = way
            times[way].append(seconds(runner, step, turn))
        for sequence in sequences:
            pool.release(sequence)
        layers, native = (min(times[way]) for way in ways)
        if native >= layers:
            backend.max_native_rows = ways[0]
            return


def choose_threads(runner: Runner, pool: PagePool, config: NviumConfig, *, max_sequences: int) -> None:
    """Let native calls of few rows, and of many, take as many threads as are fastest, up to PyTorch's number."""
    backend, most = runner.backend, torch.get_num_threads()
    if runner.has_fixed_threads or not isinstance(backend, NativeBackend) or most == 1:
        return
    numbers = sorted({*(2**power for power in range(most.bit_length())), most})
    for name, num_rows in (("few", 1), ("many", MANY_ROWS)):
        sequences = stand_ins(num_rows, pool, config, max_sequences=max_sequences)
        runs = [Run(sequence, rows, reaches_front=True) for sequence, rows in sequences.items()]
        times: dict[int, list[float]] = {number: [] for number in numbers}
        for turn, number in product(range(THREAD_REPEATS), numbers):
            setattr(backend.threads, name, number)
            times[number].append(sum(seconds(runner, Step(block, runs), turn) for block in range(config.num_exits)))
        setattr(backend.threads, name, min(numbers, key=lambda number: median(times[number])))
        for sequence in sequences:
            pool.release(sequence)


def measure_costs(runner: Runner, pool: PagePool, config: NviumConfig, *, max_sequences: int) -> StepCosts:
    """Time every block with more and more rows, one of each sequence while there are seats, without and with decisions
    for their fronts. Takes a second or so.

    Nothing else may be running. Pages kept for their content are evicted if there are no others.
    """
    bare = _measure(runner, pool, config, max_sequences=max_sequences, reaches_fronts=False)
    asked = _measure(runner, pool, config, max_sequences=max_sequences, reaches_fronts=True)
    points = {block: rising({rows: min(seconds) for rows, seconds in times.items()}) for block, times in bare.items()}
    junctions = []
    for block, times in asked.items():
        surplus = {rows: mean_but_slowest(seconds) - points[block][rows] for rows, seconds in times.items()}
        one_each = min(max_sequences, MAX_SPREAD_ROWS)
        junctions.append(line({rows: surplus[rows] for rows in surplus if rows <= one_each}))
    return StepCosts(points, junctions, passes=measure_passes(runner, pool, config, max_sequences=max_sequences))


def measure_passes(runner: Runner, pool: PagePool, config: NviumConfig, *, max_sequences: int) -> dict[int, float]:
    """Seconds of all blocks at once with one row of each of so many sequences."""
    times: dict[int, list[float]] = defaultdict(list)
    counts = [count for count in ROW_COUNTS if count <= min(max_sequences, MAX_PASS_SEQUENCES)]
    for turn, count in product(range(PASS_REPEATS), counts):
        sequences = stand_ins(count, pool, config, max_sequences=count)
        if len(sequences) == count:
            step: Step | None = None
            runs = [Run(sequence, rows, reaches_front=True) for sequence, rows in sequences.items()]
            for block in reversed(range(config.num_exits)):
                step = Step(block, runs, step, goes_on_anyway=True)
            assert step is not None
            times[count].append(seconds(runner, step, turn))
        for sequence in sequences:
            pool.release(sequence)
    return rising({count: median(of_count) for count, of_count in times.items()})


def own_costs(samples: Iterable[tuple[int, float]]) -> Line:
    """The engine's own seconds of a Step, and for each of its runs, from (runs, seconds) of some."""
    taken: dict[float, list[float]] = defaultdict(list)
    for num_runs, seconds in samples:
        taken[num_runs].append(seconds)
    return line({num_runs: median(seconds) for num_runs, seconds in taken.items()})


def line(values: Mapping[float, float]) -> Line:
    """The line through these, by least squares; neither of its numbers is negative."""
    if len(values) < 2:
        return max(0.0, *values.values(), 0.0), 0.0
    slope, fixed = linear_regression(list(values), list(values.values()))
    if slope < 0:
        return max(0.0, fmean(values.values())), 0.0
    if fixed < 0:
        return 0.0, max(0.0, sum(x * y for x, y in values.items()) / sum(x * x for x in values))
    return fixed, slope


def _measure(
    runner: Runner, pool: PagePool, config: NviumConfig, *, max_sequences: int, reaches_fronts: bool
) -> dict[int, dict[int, list[float]]]:
    """Each block's times by rows. Turns go through all Steps, so a machine's slow moments are spread over many."""
    measured: dict[int, dict[int, list[float]]] = {block: defaultdict(list) for block in range(config.num_exits)}
    for turn, num_rows in product(range(REPEATS), ROW_COUNTS):
        is_long = num_rows > MAX_SPREAD_ROWS
        if is_long and turn >= LONG_REPEATS:
            continue
        sequences = stand_ins(num_rows, pool, config, max_sequences=1 if is_long else max_sequences)
        if sum(map(len, sequences.values())) == num_rows:
            runs = [Run(sequence, rows, reaches_front=reaches_fronts) for sequence, rows in sequences.items()]
            for block, times in measured.items():
                times[num_rows].append(seconds(runner, Step(block, runs), turn))
        for sequence in sequences:
            pool.release(sequence)
    return measured


def mean_but_slowest(times: list[float]) -> float:
    return fmean(sorted(times)[:-1])


def rising(costs: dict[int, float]) -> dict[int, float]:
    """A number of rows costs no more than a larger one does."""
    return {rows: min(cost for others, cost in costs.items() if others >= rows) for rows in costs}


def stand_ins(
    num_rows: int, pool: PagePool, config: NviumConfig, *, max_sequences: int, position: int = POSITION
) -> dict[Sequence, range]:
    """Sequences with as many rows between them, as even as can be, up to a position; fewer if the pool is too small."""
    num_sequences = min(num_rows, max_sequences)
    room = pool.num_free // num_sequences * pool.page_size
    stand_ins: dict[Sequence, range] = {}
    for seat in range(num_sequences):
        own_rows = num_rows // num_sequences + (seat < num_rows % num_sequences)
        length = min(max(position, own_rows), config.max_position_embeddings, room)
        sequence = Sequence("stand-in", [0] * length, SamplingParams(), seed=seat, num_blocks=1, arrival=seat)
        if own_rows <= length and pool.grow(sequence, length):
            sequence.seat = seat
            stand_ins[sequence] = range(length - own_rows, length)
    return stand_ins


def seconds(runner: Runner, step: Step, turn: int) -> float:
    """One timed run, after which the device has nothing left to do."""
    for number, run in enumerate(step.runs):
        run.sequence.seed = turn * len(step.runs) + number
    started = time.perf_counter()
    runner.run(step)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started
