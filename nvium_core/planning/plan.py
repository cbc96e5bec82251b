"""Simulates each schedule for a routing, block costs and numbers of sequences. Parses options of `nvium plan`."""

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.progress import track
from rich.table import Table

from nvium_core.choices import Schedule
from nvium_core.engine.params import EngineConfig, InvalidRequest, require
from nvium_core.engine.schedule.costs import StepCosts
from nvium_core.engine.schedule.policies import POLICIES, Policy
from nvium_core.engine.schedule.policies.tuning import tune
from nvium_core.planning.machine import Machine
from nvium_core.planning.simulator import simulate

BASELINE: Schedule = "synchronous"

NUM_TOKENS = 10_000
"""Under every policy; rates are then good to about half a percent."""

MAX_SEQUENCES = 1000
"""Beyond, too few of them would emit two tokens."""

Row = dict[str, Any]


def machines(
    routing: str, sequences: str, fixed: str | None, per_row: str | None, head_ms: float, costs_file: Path | None
) -> list[Machine]:
    """One for each number of sequences, from option strings; times are in milliseconds.

    Raises `InvalidRequest`, naming the option, for what cannot be simulated.
    """
    require(head_ms >= 0, "head", f"must not be negative, got {head_ms}")
    exits = numbers(routing, "routing")
    costs = costs_of(len(exits), fixed, per_row, costs_file)
    return [
        Machine(
            costs=costs,
            routing=exits,
            config=EngineConfig(max_sequences=number),
            http_token_seconds=head_ms / 1000,
        )
        for number in counts(sequences, "sequences")
    ]


def costs_of(num_blocks: int, fixed: str | None, per_row: str | None, costs_file: Path | None) -> StepCosts:
    """From option strings, or from a file."""
    require(not costs_file or fixed is per_row is None, "costs", "cannot be given together with fixed or per-row")
    if costs_file:
        return saved_costs(costs_file)
    return linear_costs(fixed or "1", per_row or "0", num_blocks)


def numbers(text: str, option: str) -> tuple[float, ...]:
    """Numbers separated by commas."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise InvalidRequest(option, f"must be numbers separated by commas, got {text!r}") from None


def counts(text: str, option: str) -> tuple[int, ...]:
    """Whole numbers from 1 on, separated by commas."""
    values = numbers(text, option)
    is_whole = all(1 <= value <= MAX_SEQUENCES and value.is_integer() for value in values)
    require(is_whole, option, f"must be whole numbers from 1 to {MAX_SEQUENCES}, got {text!r}")
    return tuple(map(int, values))


def linear_costs(fixed: str, per_row: str, num_blocks: int) -> StepCosts:
    """a_k + b_k·r in milliseconds, one number for all blocks or one for each."""
    fixed_ms, per_row_ms = per_block(fixed, "fixed", num_blocks), per_block(per_row, "per-row", num_blocks)
    is_free = any(a + b == 0 for a, b in zip(fixed_ms, per_row_ms, strict=True))
    require(not is_free, "fixed", "and per-row must not both be 0")
    return StepCosts.linear([a / 1000 for a in fixed_ms], [b / 1000 for b in per_row_ms])


def per_block(text: str, option: str, num_blocks: int) -> Sequence[float]:
    values = numbers(text, option)
    is_right_length = len(values) in {1, num_blocks}
    require(is_right_length, option, f"needs one number, or one for each of {num_blocks} blocks, got {len(values)}")
    require(all(0 <= value < math.inf for value in values), option, f"must not be negative, got {text!r}")
    return values if len(values) == num_blocks else values * num_blocks


def saved_costs(path: Path) -> StepCosts:
    """What `StepCosts.as_dict` wrote as JSON."""
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        raise InvalidRequest("costs", f"{path} is not JSON") from None
    return StepCosts.from_dict(saved)


def policies(machine: Machine) -> dict[str, Policy]:
    """The engine's schedules, the baseline first, and thresholds as others publish them, at their best."""
    schedules: dict[str, Policy] = {
        name: machine.policy(name) for name in sorted(POLICIES, key=lambda name: name != BASELINE)
    }
    return {**schedules, "threshold": tune(machine.problem, machine.config.max_sequences)}


def compare(machines: Sequence[Machine]) -> list[Row]:
    """A row for each policy on each machine; shows progress on a terminal."""
    return [row for machine in track(machines, "simulating", transient=True) for row in rows_of(machine)]


def rows_of(machine: Machine) -> Iterator[Row]:
    found = {name: simulate(machine, policy, num_tokens=NUM_TOKENS) for name, policy in policies(machine).items()}
    for name, figures in found.items():
        ratio = figures.tokens_per_second / found[BASELINE].tokens_per_second
        sequences = machine.config.max_sequences
        yield {"sequences": sequences, "policy": name, "over_synchronous": ratio, **figures.as_dict()}


def table(rows: Sequence[Row]) -> Table:
    """Tokens per second and waits."""
    headings = "sequences", "policy", "tokens/s", "speed-up", "wait ms", "gap ms", "p99 gap"
    result = Table(*headings, caption="Speed-up over synchronous, mean wait to be run, median gap between tokens.")
    for row in rows:
        rates = f"{row['tokens_per_second']:.1f}", f"{row['over_synchronous']:.3f}"
        milliseconds = (f"{1000 * row[f'{name}_seconds']:.2f}" for name in ("mean_wait", "p50_gap", "p99_gap"))
        is_last = row["policy"] == rows[-1]["policy"]
        result.add_row(str(row["sequences"]), row["policy"], *rates, *milliseconds, end_section=is_last)
    return result


def as_dict(machines: Sequence[Machine], rows: Sequence[Row]) -> dict[str, Any]:
    """Inputs and results, for JSON."""
    asked = machines[0]
    return {
        "routing": asked.routing,
        "costs": asked.costs.as_dict(),
        "head_seconds": asked.http_token_seconds,
        "rows": rows,
    }
