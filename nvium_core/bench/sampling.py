"""What each way to sample costs over plain draws at temperature 1, and what early exits gain in it.

All ways take turns on one engine with the same seeds, each with the race of schedules and with whole passes.
"""

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from rich.table import Table

from nvium_core.bench.contenders import own
from nvium_core.bench.contenders.contender import Generation, Race
from nvium_core.bench.contenders.lineup import BASELINE, OURS
from nvium_core.bench.harness import Figures, Subject, interleaved, median_ratio
from nvium_core.bench.peers import checked_turn, rates, summary
from nvium_core.choices import SUGGESTED
from nvium_core.engine.params import SamplingParams

PLAIN = "plain"
WAYS: dict[str, Mapping[str, Any]] = {
    PLAIN: {},
    "suggested": SUGGESTED,
    "top-k": {"top_k": 40},
    "min-p": {"min_p": 0.05},
    "penalty": {"presence_penalty": 1},
    "temperature 0": {"temperature": 0},
    "mixture": {"sampling": "mixture"},
}
"""Changes to plain draws from the exits at temperature 1."""


def measure(subject: Subject, *, sequences: Sequence[int] = (1, 8), tokens: int = 64, repeats: int = 9) -> Figures:
    """A row for each number of sequences, of `tokens` each, prefill included."""
    rows = [compare(subject, race, repeats) for race in own.races(subject, sequences, tokens)]
    return {"ways": WAYS, "tokens": tokens, "repeats": repeats, "rows": rows}


def compare(subject: Subject, race: Race, repeats: int) -> Figures:
    """All ways at one number of sequences. Rates are in tokens per second."""
    engine = own.engine_for(subject.model, race)
    contenders = {}
    for way, schedule in product(WAYS, (OURS, BASELINE)):
        asked = SamplingParams(**{"sampling": "exits", **WAYS[way]})
        contender = own.contender(engine, race, schedule, asked)
        contenders[f"{way}/{schedule}"] = checked_turn(way, contender, race)
    turns = interleaved(contenders, repeats, f"{race.num_sequences} sequences")
    plain = turns[f"{PLAIN}/{OURS}"]
    ways = {way: compared(turns[f"{way}/{OURS}"], turns[f"{way}/{BASELINE}"], plain, race) for way in WAYS}
    return {"sequences": race.num_sequences, "ways": ways}


def compared(
    turns: Sequence[Generation], dense: Sequence[Generation], plain: Sequence[Generation], race: Race
) -> Figures:
    """Rates of one way, and median ratios to plain draws and to whole passes."""
    return {
        **summary(turns, race),
        "over_plain": median_ratio(rates(turns), rates(plain)),
        f"over_{BASELINE}": median_ratio(rates(turns), rates(dense)),
        BASELINE: summary(dense, race),
    }


def table(figures: Figures) -> Table:
    names = "over_plain", f"over_{BASELINE}"
    result = Table("at once", "way", "tokens/s", "over plain", f"over {BASELINE}")
    for row in figures["rows"]:
        *_, last = row["ways"]
        for name, seen in row["ways"].items():
            rate, ratios = f"{seen['tokens_per_second']:.1f}", (f"{seen[ratio]:.3f}" for ratio in names)
            result.add_row(str(row["sequences"]), name, rate, *ratios, end_section=name == last)
    return result
