"""Capacity planning: what each schedule would give for a routing, block costs and numbers of sequences, simulated.

Needs no model and no torch. `nvium plan` reads its options through here.
"""

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.progress import track
from rich.table import Table

from nvium_core.engine.params import InvalidRequest, require
from nvium_core.engine.schedule.costs import StepCosts
from nvium_core.planning.simulator import Load, policies_for, simulate

NUM_TOKENS = 10_000
"""Spoken by every policy under every load: rates are then good to about half a percent."""

MOST_SEQUENCES = 1000
"""With more, too few of them would speak twice."""

Row = dict[str, Any]


def loads(
    routing: str, sequences: str, fixed: str | None, per_row: str | None, head_ms: float, costs_file: Path | None
) -> list[Load]:
    """A load for each number of sequences, from options as they are typed; times are in milliseconds.

    Raises `InvalidRequest`, naming the option, for what cannot be simulated.
    """
    exits, costs = numbers(routing, "routing"), costs_of(routing, fixed, per_row, costs_file)
    return [
        Load(routing=exits, costs=costs, num_sequences=number, head_seconds=head_ms / 1000)
        for number in counts(sequences, "sequences")
    ]


def costs_of(routing: str, fixed: str | None, per_row: str | None, costs_file: Path | None) -> StepCosts:
    """As they are typed, for as many blocks as the routing has; or from a file."""
    require(not costs_file or fixed is per_row is None, "costs", "cannot be given together with fixed or per-row")
    if costs_file:
        return saved_costs(costs_file)
    return linear_costs(fixed or "1", per_row or "0", len(numbers(routing, "routing")))


def numbers(text: str, option: str) -> tuple[float, ...]:
    """Numbers separated by commas."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise InvalidRequest(option, f"must be numbers separated by commas, got {text!r}") from None


def counts(text: str, option: str) -> tuple[int, ...]:
    """Whole numbers from 1 on, separated by commas."""
    values = numbers(text, option)
    is_whole = all(1 <= value <= MOST_SEQUENCES and value.is_integer() for value in values)
    require(is_whole, option, f"must be whole numbers from 1 to {MOST_SEQUENCES}, got {text!r}")
    return tuple(map(int, values))


def linear_costs(fixed: str, per_row: str, num_blocks: int) -> StepCosts:
    """a_k + b_k·r from milliseconds, one number for all blocks or one for each."""
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
    """Measured costs as `StepCosts.as_dict` gave them, from a JSON file."""
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        raise InvalidRequest("costs", f"{path} is not JSON") from None
    return StepCosts.from_dict(saved)


def compare(loads: Sequence[Load]) -> list[Row]:
    """A row of figures for each policy under each load; shows progress on a terminal."""
    total = len(loads) * len(policies_for(loads[0]))
    return list(track(_rows(loads), "simulating", total=total, transient=True))


def _rows(loads: Sequence[Load]) -> Iterator[Row]:
    """`synchronous` comes first under every load, and is what the others are measured against."""
    for load in loads:
        baseline = 0.0
        for name, policy in policies_for(load).items():
            figures = simulate(policy, load, num_tokens=NUM_TOKENS)
            baseline = baseline or figures.tokens_per_second
            ratio = figures.tokens_per_second / baseline
            yield {"sequences": load.num_sequences, "policy": name, "over_synchronous": ratio, **figures.as_dict()}


def table(rows: Sequence[Row]) -> Table:
    """Tokens per second, and what sequences wait for it."""
    headings = "sequences", "policy", "tokens/s", "speed-up", "wait ms", "gap ms", "p99 gap"
    result = Table(*headings, caption="Speed-up over synchronous, mean wait to be run, median gap between tokens.")
    for row in rows:
        rates = f"{row['tokens_per_second']:.1f}", f"{row['over_synchronous']:.3f}"
        milliseconds = (f"{1000 * row[f'{name}_seconds']:.2f}" for name in ("mean_wait", "p50_gap", "p99_gap"))
        is_last = row["policy"] == rows[-1]["policy"]
        result.add_row(str(row["sequences"]), row["policy"], *rates, *milliseconds, end_section=is_last)
    return result


def as_dict(loads: Sequence[Load], rows: Sequence[Row]) -> dict[str, Any]:
    """What was asked and what came of it, for JSON."""
    asked = loads[0]
    return {
        "routing": asked.routing,
        "costs": asked.costs.as_dict(),
        "head_seconds": asked.head_seconds,
        "rows": rows,
    }
