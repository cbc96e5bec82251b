"""Measures the cost of each sampling mode over plain sampling at temperature 1, and the speed-up of exits in it.

All modes run in interleaved turns on one engine with the same seeds, with the schedules `race` and `whole`.
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
"""Sampling parameters of each mode, beyond sampling from the exits at temperature 1."""


def measure(subject: Subject, *, sequences: Sequence[int] = (1, 8), tokens: int = 64, repeats: int = 9) -> Figures:
    """Measure a row for each number of sequences, of `tokens` tokens each, prefill included."""
    rows = [compare(subject, race, repeats) for race in own.races(subject, sequences, tokens)]
    return {"ways": WAYS, "tokens": tokens, "repeats": repeats, "rows": rows}


def compare(subject: Subject, race: Race, repeats: int) -> Figures:
    """Measure all modes at one number of sequences. Rates are in tokens per second."""
    engine = own.engine_for(subject.model, race)
    contenders = {}
    for way, schedule in product(WAYS, (OURS, BASELINE)):
        params = SamplingParams(**{"sampling": "exits", **WAYS[way]})
        contender = own.contender(engine, race, schedule, params)
        contenders[f"{way}/{schedule}"] = checked_turn(way, contender, race)
    turns = interleaved(contenders, repeats, f"{race.num_sequences} sequences")
    plain = turns[f"{PLAIN}/{OURS}"]
    ways = {way: compared(turns[f"{way}/{OURS}"], turns[f"{way}/{BASELINE}"], plain, race) for way in WAYS}
    return {"sequences": race.num_sequences, "ways": ways}


def compared(
    turns: Sequence[Generation], dense: Sequence[Generation], plain: Sequence[Generation], race: Race
) -> Figures:
    """Return the rates of one mode, and its median ratios to plain sampling and to full depth."""
    return {
        **summary(turns, race),
        "over_plain": median_ratio(rates(turns), rates(plain)),
        f"over_{BASELINE}": median_ratio(rates(turns), rates(dense)),
        BASELINE: summary(dense, race),
    }


def table(figures: Figures) -> Table:
    names = "over_plain", f"over_{BASELINE}"
    result = Table("sequences", "mode", "tokens/s", "over plain", f"over {BASELINE}")
    for row in figures["rows"]:
        *_, last = row["ways"]
        for name, seen in row["ways"].items():
            rate, ratios = f"{seen['tokens_per_second']:.1f}", (f"{seen[ratio]:.3f}" for ratio in names)
            result.add_row(str(row["sequences"]), name, rate, *ratios, end_section=name == last)
    return result
