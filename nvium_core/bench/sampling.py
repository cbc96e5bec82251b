"""What ways to sample cost beside plain draws at temperature 1, and whether early exits pay in each.

All ways take turns on one engine with the same seeds, each under the schedule that defers layers and under the dense
one. Each has policies of its own, so that none goes by exits that another took.
"""

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from rich.table import Table

from nvium_core.bench.contenders import own
from nvium_core.bench.contenders.contender import Race
from nvium_core.bench.contenders.lineup import BASELINE, OURS
from nvium_core.bench.harness import Figures, Subject, interleaved, median_ratio
from nvium_core.bench.peers import Turn, on_the_clock, summary
from nvium_core.choices import SUGGESTED
from nvium_core.engine.params import SamplingParams, require

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
"""What each asks beside tokens from the exits at temperature 1."""


def measure(subject: Subject, *, sequences: Sequence[int] = (1, 8), tokens: int = 64, repeats: int = 9) -> Figures:
    """A row for each number of sequences, of `tokens` each, prefill included."""
    room = subject.context - len(subject.prompt)
    require(tokens <= room, "tokens", f"after the prompt there is room for {room}, got {tokens}")
    races = [Race(prompt=subject.prompt, num_sequences=number, num_tokens=tokens) for number in sequences]
    rows = [compare(subject, race, repeats) for race in races]
    return {"ways": WAYS, "tokens": tokens, "repeats": repeats, "rows": rows}


def compare(subject: Subject, race: Race, repeats: int) -> Figures:
    """All ways at one number of sequences. Rates are in tokens per second."""
    engine = own.engine_for(subject.model, race)
    engine.calibrate()
    contenders = {}
    for way, schedule in product(WAYS, (OURS, BASELINE)):
        asked = SamplingParams(**{"sampling": "exits", **WAYS[way]})
        contender = own.contender(engine, race, own.policy_for(engine, schedule), asked)
        contenders[f"{way}/{schedule}"] = on_the_clock(way, contender, race)
    turns = interleaved(contenders, repeats, f"{race.num_sequences} sequences")
    plain = turns[f"{PLAIN}/{OURS}"]
    ways = {way: beside(turns[f"{way}/{OURS}"], turns[f"{way}/{BASELINE}"], plain, race) for way in WAYS}
    return {"sequences": race.num_sequences, "ways": ways}


def beside(turns: Sequence[Turn], dense: Sequence[Turn], plain: Sequence[Turn], race: Race) -> Figures:
    """Of one way: rates and milliseconds, and median ratios of rates, over plain draws and over the dense schedule."""
    rates, dense_rates, plain_rates = (
        [turn.generated.tokens_per_second for turn in taken] for taken in (turns, dense, plain)
    )
    return {
        **summary(turns, race),
        "over_plain": median_ratio(rates, plain_rates),
        f"over_{BASELINE}": median_ratio(rates, dense_rates),
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
