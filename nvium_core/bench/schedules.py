"""How much the schedules gain over `synchronous`, measured and simulated.

Timed while all sequences run: neither prefill nor the last sequences to finish count. Sequences have different seeds;
equal draws would move together under any schedule.
"""

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import get_args

from rich.progress import track
from rich.table import Table

from nvium_core.bench.harness import Figures, Subject, checked, interleaved, median_ratio, pointwise
from nvium_core.choices import Schedule
from nvium_core.engine.engine import Engine
from nvium_core.engine.events import TokenEvent
from nvium_core.engine.params import EngineConfig, SamplingParams, require
from nvium_core.engine.schedule.costs import Line, StepCosts
from nvium_core.engine.schedule.policies import Optimal
from nvium_core.planning.machine import Machine
from nvium_core.planning.simulator import simulate

BASELINE: Schedule = "synchronous"
MIN_RATIO = 0.97
"""No schedule may be slower than this share of `synchronous`."""

SPARE_FACTOR, SPARE_TOKENS = 2, 64
"""Tokens that a sequence may generate beyond the average, so that none finishes while others are timed."""


def measure(
    subject: Subject,
    *,
    sequences: Sequence[int] = (1,),
    tokens: int = 128,
    repeats: int = 5,
    simulated_tokens: int = 10_000,
) -> Figures:
    """A row for each number of sequences, which generate `tokens` each on average while timed."""
    room = subject.context - len(subject.prompt)
    require(tokens <= room, "tokens", f"after the prompt there is room for {room}, got {tokens}")
    rows = [compare(subject, number, tokens, repeats, simulated_tokens) for number in sequences]
    return {"tokens": tokens, "repeats": repeats, "rows": rows}


@dataclass(slots=True)
class Window:
    """What was measured while all sequences ran."""

    seconds: float = 0.0
    exits: Counter[int] = field(default_factory=Counter)

    @property
    def tokens_per_second(self) -> float:
        return self.exits.total() / self.seconds


Windows = Mapping[str, Sequence[Window]]
"""By schedule and turn."""


def compare(subject: Subject, num_sequences: int, num_tokens: int, repeats: int, simulated_tokens: int) -> Figures:
    """Each schedule's tokens per second, the ratio to `synchronous`, and the simulator's ratio."""
    engines = {name: _engine(subject, name, num_sequences, num_tokens) for name in get_args(Schedule)}
    calibrated = pointwise_median([engine.calibrate() for engine in engines.values()])
    optimal = prepared(engines["optimal"], num_sequences)
    prompts = [subject.prompt] * num_sequences
    contenders = {name: partial(measure_window, engine, prompts, num_tokens) for name, engine in engines.items()}
    windows = interleaved(contenders, repeats, f"{num_sequences} sequences")
    routing = shares(windows, subject.model.config.num_exits)
    costs = {"calibrated": calibrated, "learnt": optimal.costs}
    config = EngineConfig(max_sequences=num_sequences)
    machines = {way: Machine(routing=routing, costs=costs[way], config=config) for way in costs}
    schedules = beside(windows, {way: predict(machine, simulated_tokens) for way, machine in machines.items()})
    return {
        "sequences": num_sequences,
        "routing": routing,
        **{f"{way}_costs": costs[way].as_dict() for way in costs},
        "schedules": schedules,
        "optimal_is_never_slower": schedules["optimal"][f"over_{BASELINE}"] >= MIN_RATIO,
    }


def shares(windows: Windows, num_exits: int) -> tuple[float, ...]:
    """p_k as observed; the same under every schedule."""
    exits = sum((turn.exits for turns in windows.values() for turn in turns), Counter[int]())
    return tuple(exits[k] / exits.total() for k in range(1, num_exits + 1))


def _engine(subject: Subject, schedule: Schedule, num_sequences: int, num_tokens: int) -> Engine:
    """The cache has room for every sequence."""
    pages = -(-(len(subject.prompt) + token_limit(subject.context, len(subject.prompt), num_tokens)) // 16) + 2
    return subject.engine(schedule=schedule, max_sequences=num_sequences, cache_tokens=num_sequences * pages * 16)


def token_limit(context: int, num_prompt_tokens: int, num_tokens: int) -> int:
    """Limit for one sequence: above the average, within the context."""
    return min(SPARE_FACTOR * num_tokens + SPARE_TOKENS, context - num_prompt_tokens)


def pointwise_median(measured: Sequence[StepCosts]) -> StepCosts:
    """For each number separately."""
    return StepCosts(
        pointwise(median, measured),
        [median_line([costs.junctions[block] for costs in measured]) for block in range(measured[0].num_blocks)],
        median_line([costs.own for costs in measured]),
        {rows: median(costs.passes[rows] for costs in measured) for rows in measured[0].passes},
    )


def median_line(lines: Sequence[Line]) -> Line:
    return median(fixed for fixed, _ in lines), median(each for _, each in lines)


def prepared(engine: Engine, num_sequences: int) -> Optimal:
    """The engine's policy with its tables solved."""
    policy = engine.scheduler.policy
    assert isinstance(policy, Optimal)
    for number in range(1, num_sequences + 1):
        policy.solve_now(number)
    return policy


def measure_window(engine: Engine, prompts: list[list[int]], num_tokens: int, turn: int) -> Window:
    """From the Step in which the last sequence emits its first token, until `num_tokens` per sequence have been
    generated."""
    engine.scheduler.policy.wait()
    for number, prompt in enumerate(prompts):
        limit = token_limit(engine.context, len(prompt), num_tokens)
        params = SamplingParams(max_tokens=limit, seed=turn * len(prompts) + number, ignore_eos=True)
        engine.add(str(number), prompt, params)
    try:
        return _seen(engine, len(prompts), num_tokens * len(prompts))
    finally:
        for number in range(len(prompts)):
            engine.cancel(str(number))


def _seen(engine: Engine, num_sequences: int, num_tokens: int) -> Window:
    speakers, seen = set[str](), Window()
    while engine.has_work and len(speakers) < num_sequences:
        speakers |= {event.sequence_id for event in tokens_of(engine)}
    started = time.perf_counter()
    while engine.has_work and seen.exits.total() < num_tokens:
        seen.exits.update(event.exit for event in tokens_of(engine))
    seen.seconds = time.perf_counter() - started
    return seen


def tokens_of(engine: Engine) -> Iterator[TokenEvent]:
    """Of the next Step. Raises `EngineError` for a failure."""
    return map(checked, engine.step())


def predict(machine: Machine, num_tokens: int) -> dict[str, float]:
    """The simulator's tokens per second. A block's costs include its junction, so the head is free."""
    schedules = track(get_args(Schedule), "simulating", transient=True)
    return {
        name: simulate(machine, machine.policy(name), num_tokens=num_tokens).tokens_per_second for name in schedules
    }


def beside(windows: Windows, predicted: Mapping[str, Mapping[str, float]]) -> dict[str, Figures]:
    """Measured and simulated ratios, the latter with calibrated and with learnt costs."""
    rates = {name: [turn.tokens_per_second for turn in turns] for name, turns in windows.items()}
    return {name: _beside(rates, predicted, name) for name in rates}


def _beside(rates: Mapping[str, list[float]], predicted: Mapping[str, Mapping[str, float]], name: str) -> Figures:
    ratio = median_ratio(rates[name], rates[BASELINE])
    foreseen = {way: simulated[name] / simulated[BASELINE] for way, simulated in predicted.items()}
    return {
        "tokens_per_second": median(rates[name]),
        f"over_{BASELINE}": ratio,
        f"predicted_over_{BASELINE}": foreseen["calibrated"],
        f"predicted_as_learnt_over_{BASELINE}": foreseen["learnt"],
        "share_of_predicted": ratio / foreseen["calibrated"],
        "share_of_predicted_as_learnt": ratio / foreseen["learnt"],
        "turns": rates[name],
    }


def table(figures: Figures) -> Table:
    names = "over_synchronous", "predicted_over_synchronous", "share_of_predicted", "share_of_predicted_as_learnt"
    columns = "at once", "schedule", "tokens/s", "speed-up", "predicted", "share", "learnt"
    result = Table(
        *columns, caption="Over synchronous; shares of what is predicted from costs as calibrated and as learnt."
    )
    for row in figures["rows"]:
        for name, seen in row["schedules"].items():
            rate, ratios = f"{seen['tokens_per_second']:.1f}", (f"{seen[ratio]:.3f}" for ratio in names)
            result.add_row(str(row["sequences"]), name, rate, *ratios, end_section=name == BASELINE)
    return result
