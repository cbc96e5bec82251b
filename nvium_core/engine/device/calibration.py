"""What a Step costs on this device: measured on an idle engine before it serves, or assumed until then."""

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from statistics import fmean, linear_regression, median

import torch

from nvium_core.engine.device.budget import Budget
from nvium_core.engine.device.graphs import GraphsBackend
from nvium_core.engine.device.native.backend import NativeBackend
from nvium_core.engine.device.native.steps import MAX_RUN_ROWS
from nvium_core.engine.device.runner import Runner
from nvium_core.engine.params import SamplingParams
from nvium_core.engine.schedule.costs import Line, StepCosts
from nvium_core.engine.schedule.kv_cache import PagePool
from nvium_core.engine.schedule.sequence import Sequence
from nvium_core.engine.schedule.step import Run, Step
from nvium_core.model.config import NviumConfig

COARSE_ROWS = (1, 16, 64, 256)
"""What is measured first, in case there is no time for more."""

ROW_COUNTS = (1, 2, 4, 8, 12, 16, 24, 32, 64, 128, 256)
"""What is measured; in between and beyond, costs are taken to be linear."""

MAX_SPREAD_ROWS = 64
"""So many are of as many sequences as there are seats; more than these, and than there are seats, are of one, as a
prompt's are."""

POSITION = 64
"""How long the sequences are that are measured, if the cache holds them."""

REPEATS, LONG_REPEATS = 5, 2
"""Of every Step, and of one with more rows. Each draws exits anew, which decides how often the head is computed."""

PASS_REPEATS = 5
"""Of whole passes; the least counts, as for Steps, or else a noisy machine would favour staircases."""

FIRST_PASSES, NEXT_PASSES = 2, 6
"""Where passes are launched ahead: so many go before, as none is launched ahead of them, and so many are timed."""

PROMPT_ROWS = (64, 128, 256)
"""Rows of one sequence for which native calls and the layers are compared, while native calls win."""

PROMPT_REPEATS = 3

MANY_ROWS, THREAD_REPEATS = 8, 15
"""Rows, of as many sequences, that stand for many; whole passes with each number of threads."""

MAX_PROMPT_POSITION = 1024
"""Where the middle of the context is further, prompts are compared here."""

FEW_ROWS, FEW_ROWS_RATIO = 64, 8
"""So many rows are expected to cost so many times what one does, before any were timed."""

ASSUMED_ROWS = 32
"""Rows that cost as much as running a block at all does, until measured."""


def assumed_costs(config: NviumConfig) -> StepCosts:
    """Costs in proportion to the blocks' layers: their ratios are all that a schedule depends on."""
    layers = [float(len(block)) for block in config.blocks]
    return StepCosts.linear(layers, [cost / ASSUMED_ROWS for cost in layers])


def choose_path(runner: Runner, pool: PagePool, config: NviumConfig, budget: Budget | None = None) -> None:
    """Let prompts run natively up to where the layers are faster, in the middle of the context.

    Where the budget ends first, they run natively up to what has been compared, or as far as they may at all.
    """
    backend, budget = runner.backend, budget or Budget()
    if not isinstance(backend, NativeBackend) or backend.is_deterministic:
        return
    backend.max_native_rows = MAX_RUN_ROWS
    position = min(config.max_position_embeddings // 2, MAX_PROMPT_POSITION)
    expected = FEW_ROWS_RATIO * min(_timed(runner, pool, config, 1, position, budget), default=0.0)
    for num_rows in PROMPT_ROWS:
        ways, times = (backend.max_native_rows, num_rows), list[tuple[float, int]]()
        for turn, way in product(range(PROMPT_REPEATS), ways):
            if turn == 0 or budget.allows(expected):
                backend.max_native_rows = way
                times += [
                    (taken, way) for taken in _timed(runner, pool, config, num_rows, position, budget, expected, turn)
                ]
        backend.max_native_rows = ways[0]
        if {way for _, way in times} != {*ways} or min(times)[1] == ways[0]:
            return
        backend.max_native_rows = num_rows
        expected = 2 * min(times)[0]


def choose_threads(
    runner: Runner, pool: PagePool, config: NviumConfig, *, max_sequences: int, budget: Budget | None = None
) -> None:
    """Let native calls of few rows, and of many, take as many threads as are fastest, up to PyTorch's number."""
    backend, most, budget = runner.backend, torch.get_num_threads(), budget or Budget()
    if runner.has_fixed_threads or not isinstance(backend, NativeBackend) or most == 1:
        return
    numbers = sorted({*(2**power for power in range(most.bit_length())), most})
    for name, num_rows in (("few", 1), ("many", MANY_ROWS)):
        sequences = stand_ins(num_rows, pool, config, max_sequences=max_sequences)
        step = whole_pass(sequences, config.num_exits)
        times: dict[int, list[float]] = {number: [] for number in numbers}
        for turn, number in product(range(THREAD_REPEATS), numbers):
            if times[number] and not budget.allows(times[number][-1]):
                break
            setattr(backend.threads, name, number)
            times[number].append(seconds(runner, step, turn))
        setattr(backend.threads, name, min(numbers, key=lambda number: median(times[number])))
        for sequence in sequences:
            pool.release(sequence)


def _timed(
    runner: Runner,
    pool: PagePool,
    config: NviumConfig,
    num_rows: int,
    position: int,
    budget: Budget,
    expected: float = 0.0,
    turn: int = 0,
) -> list[float]:
    """The seconds of so many rows of one sequence; nothing where there is no room or no time for them."""
    sequences = stand_ins(num_rows, pool, config, max_sequences=1, position=position) if budget.allows(expected) else {}
    runs = [Run(sequence, rows, reaches_front=False) for sequence, rows in sequences.items()]
    taken = [seconds(runner, Step(0, runs), turn)] if runs else []
    for sequence in sequences:
        pool.release(sequence)
    return taken


def measure_costs(
    runner: Runner, pool: PagePool, config: NviumConfig, *, max_sequences: int, budget: Budget | None = None
) -> StepCosts:
    """Time every block with more and more rows, one of each sequence while there are seats, without and with decisions
    for their fronts. Takes a second or so for a small model; of a large one, fewer numbers of rows and fewer times.

    Nothing else may be running. Pages kept for their content are evicted if there are no others.
    """
    budget = budget or Budget()
    half = budget.share(0.5)
    bare = _measure(runner, pool, config, max_sequences=max_sequences, reaches_fronts=False, budget=half)
    most = budget.share(0.7)
    asked = _measure(runner, pool, config, max_sequences=max_sequences, reaches_fronts=True, budget=most)
    points = {block: rising({rows: min(seconds) for rows, seconds in times.items()}) for block, times in bare.items()}
    junctions = []
    for block, times in asked.items():
        known = points[block]
        surplus = {rows: mean_but_slowest(taken) - known[rows] for rows, taken in times.items() if rows in known}
        junctions.append(line({rows: surplus[rows] for rows in surplus if rows <= max_sequences}))
    apart = StepCosts(points, junctions)
    counts = [count for count in ROW_COUNTS if count <= max_sequences]
    expected = {count: apart.apart(count) for count in counts}
    passes = expected | measure_passes(runner, pool, config, expected, budget)
    return StepCosts(points, junctions, passes=passes).with_bounded_passes()


def measure_passes(
    runner: Runner, pool: PagePool, config: NviumConfig, expected: Mapping[int, float], budget: Budget
) -> dict[int, float]:
    """Seconds of all blocks at once with one row of each of so many sequences, as far as there is time; `expected` are
    those of the blocks by themselves."""
    times: dict[int, list[float]] = defaultdict(list)
    for turn, count in product(range(PASS_REPEATS), expected):
        if not budget.allows(expected[count]):
            continue
        sequences = stand_ins(count, pool, config, max_sequences=count)
        if len(sequences) == count:
            times[count].append(pass_seconds(runner, sequences, config.num_exits, turn))
        for sequence in sequences:
            pool.release(sequence)
    return rising({count: min(of_count) for count, of_count in times.items()})


def pass_seconds(runner: Runner, sequences: Mapping[Sequence, range], num_blocks: int, turn: int) -> float:
    """Of a pass; where passes are launched ahead, of one among several that follow each other."""
    num_passes = FIRST_PASSES + NEXT_PASSES
    if not isinstance(runner.backend, GraphsBackend) or min(each.num_tokens for each in sequences) <= num_passes:
        return seconds(runner, whole_pass(sequences, num_blocks), turn)
    started = 0.0
    for number, sequence in enumerate(sequences):
        sequence.seed = turn * len(sequences) + number
        del sequence.token_ids[-num_passes:]
    for number in range(num_passes):
        if number == FIRST_PASSES:
            started = time.perf_counter()
        rows = {sequence: range(sequence.num_tokens - 1, sequence.num_tokens) for sequence in sequences}
        for result in runner.run(whole_pass(rows, num_blocks)):
            for sequence, decision in result.decisions.items():
                if decision.token_id is not None:
                    sequence.token_ids.append(decision.token_id)
    wait_for(runner.model.device)
    return (time.perf_counter() - started) / NEXT_PASSES


def whole_pass(sequences: Mapping[Sequence, range], num_blocks: int) -> Step:
    """These rows, fronts among them, through all blocks."""
    runs = [Run(sequence, rows, reaches_front=True) for sequence, rows in sequences.items()]
    step = Step(num_blocks - 1, runs, goes_on_anyway=True)
    for block in reversed(range(num_blocks - 1)):
        step = Step(block, runs, step, goes_on_anyway=True)
    return step


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
    runner: Runner, pool: PagePool, config: NviumConfig, *, max_sequences: int, reaches_fronts: bool, budget: Budget
) -> dict[int, dict[int, list[float]]]:
    """Each block's times by rows. Turns go through all Steps, so a machine's slow moments are spread over many."""
    measured: dict[int, dict[int, list[float]]] = {block: defaultdict(list) for block in range(config.num_exits)}
    for turn, num_rows in _order():
        expected = sum(expected_seconds(times, num_rows) for times in measured.values())
        if not budget.allows(expected) and measured[0]:
            continue
        is_long = num_rows > max(MAX_SPREAD_ROWS, max_sequences)
        sequences = stand_ins(num_rows, pool, config, max_sequences=1 if is_long else max_sequences)
        if sum(map(len, sequences.values())) == num_rows:
            runs = [Run(sequence, rows, reaches_front=reaches_fronts) for sequence, rows in sequences.items()]
            for block, times in measured.items():
                times[num_rows].append(seconds(runner, Step(block, runs), turn))
        for sequence in sequences:
            pool.release(sequence)
    return {block: dict(sorted(times.items())) for block, times in measured.items()}


def _order() -> Iterator[tuple[int, int]]:
    """(turn, rows) of what is measured one after the other."""
    finer = [rows for rows in ROW_COUNTS if rows not in COARSE_ROWS]
    for turn, num_rows in product(range(REPEATS), (*COARSE_ROWS, *finer)):
        if num_rows <= MAX_SPREAD_ROWS or turn < LONG_REPEATS:
            yield turn, num_rows


def expected_seconds(times: Mapping[int, list[float]], num_rows: int) -> float:
    """As the most rows below that were timed took, each row as long as each of those; 0 where none were."""
    fewer = [rows for rows in times if rows <= num_rows]
    return min(times[max(fewer)]) * num_rows / max(fewer) if fewer else 0.0


def mean_but_slowest(times: list[float]) -> float:
    return fmean(sorted(times)[: max(1, len(times) - 1)])


def rising(costs: dict[int, float]) -> dict[int, float]:
    """A number of rows costs no more than a larger one does."""
    return {rows: min(cost for others, cost in costs.items() if others >= rows) for rows in costs}


def stand_ins(
    num_rows: int,
    pool: PagePool,
    config: NviumConfig,
    *,
    max_sequences: int,
    position: int = POSITION,
    params: SamplingParams | None = None,
) -> dict[Sequence, range]:
    """Sequences with as many rows between them, as even as can be, up to a position; fewer if the pool is too small."""
    num_sequences = max(1, min(num_rows, max_sequences, pool.num_free))
    room = pool.num_free // num_sequences * pool.page_size
    stand_ins: dict[Sequence, range] = {}
    for seat in range(num_sequences):
        own_rows = num_rows // num_sequences + (seat < num_rows % num_sequences)
        length = min(max(position, own_rows), config.max_position_embeddings, room)
        asked = params or SamplingParams()
        sequence = Sequence("stand-in", [0] * length, asked, seed=seat, num_blocks=config.num_exits, arrival=seat)
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
    wait_for(runner.model.device)
    return time.perf_counter() - started


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
