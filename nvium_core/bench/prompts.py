"""Time to first token by prompt length, for each contender of `peers`, in turns.

Our first token may exit early. So a turn generates one first token at each exit, and averages them weighted by the
routers' probabilities. Prefix caching is off.
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import count
from statistics import fmean, median
from typing import NamedTuple, get_args

from rich.table import Table
from rich.text import Text

from nvium_core.bench.contenders.contender import Contender, Race
from nvium_core.bench.contenders.lineup import OTHERS, OURS, Lineup, lineup
from nvium_core.bench.harness import Figures, Subject, interleaved, median_ratio
from nvium_core.choices import Schedule
from nvium_core.engine.engine import Engine
from nvium_core.engine.params import SamplingParams, require

MIN_SEEN_PROBABILITY = 0.95
"""Seeds are tried until the exits seen have this much probability together."""

Draws = Mapping[int, tuple[int, float]]
"""By exit: a seed whose first token leaves there, and the exit's probability."""


def measure(
    subject: Subject,
    *,
    prompt_tokens: Sequence[int] = (16, 64, 256, 512, 900),
    repeats: int = 5,
    against: Collection[str] = OTHERS,
) -> Figures:
    """A row for each length, each with its own prompt. One sequence."""
    longest = max(prompt_tokens)
    require(longest < subject.context, "prompt_tokens", f"must be below {subject.context}, got {longest}")
    with lineup(subject, against) as who:
        rows = [compare(who, length, repeats) for length in prompt_tokens]
    return {"repeats": repeats, "left_out": who.left_out, "rows": rows}


def compare(who: Lineup, length: int, repeats: int) -> Figures:
    race = Race(prompt=who.subject.random_tokens(length, length), num_sequences=1, num_tokens=1)
    with who.ready(race) as (engine, contenders):
        draws = first_draws(engine, race.prompt)
        clocks = {
            name: weighed(each, draws) if name in get_args(Schedule) else each
            for name, each in ((name, first_token(each)) for name, each in contenders.items())
        }
        turns = interleaved(clocks, repeats, f"{length} tokens")
    return {
        "prompt_tokens": length,
        "routing": {exit_: probability for exit_, (_, probability) in draws.items()},
        "contenders": {name: summary(turns[OURS], taken) for name, taken in turns.items()},
    }


def first_draws(engine: Engine, prompt: list[int]) -> Draws:
    """Seeds are tried from 0 on."""
    draws: dict[int, tuple[int, float]] = {}
    for seed in count():
        [generated] = engine.generate([prompt], SamplingParams(max_tokens=1, seed=seed, ignore_eos=True))
        draws.setdefault(generated.exits[0], (seed, generated.exit_probabilities[0]))
        if sum(probability for _, probability in draws.values()) >= MIN_SEEN_PROBABILITY:
            break
    return dict(sorted(draws.items()))


class First(NamedTuple):
    """A first token's times, in seconds: on the clock, and of the processor in all threads."""

    seconds: float
    processor_seconds: float


def first_token(generate_turn: Contender) -> Callable[[int], First]:
    def turn(number: int) -> First:
        started = time.process_time()
        [seconds] = generate_turn(number).first_token_seconds
        return First(seconds, time.process_time() - started)

    return turn


def weighed(first_turn: Callable[[int], First], draws: Draws) -> Callable[[int], First]:
    """The mean over exits; the contender takes the seed as the turn's number."""

    def turn(number: int) -> First:
        taken = [first_turn(seed) for seed, _ in draws.values()]
        shares = [probability for _, probability in draws.values()]
        return First(*(fmean(each, shares) for each in zip(*taken, strict=True)))

    return turn


def summary(ours: Sequence[First], theirs: Sequence[First]) -> Figures:
    """Medians, and the median ratio to ours."""
    mine, seconds = ([first.seconds for first in turns] for turns in (ours, theirs))
    return {
        "first_token_ms": 1000 * median(seconds),
        "processor_ms": 1000 * median(first.processor_seconds for first in theirs),
        "over_ours": median_ratio(seconds, mine),
        "turns_ms": [1000 * each for each in seconds],
    }


def table(figures: Figures) -> Table:
    left_out = "\n".join(f"Left out: {peer}, {reason}." for peer, reason in figures["left_out"].items())
    result = Table("prompt", "contender", "first ms", "over ours", caption=Text(left_out) if left_out else None)
    for row in figures["rows"]:
        *_, last = row["contenders"]
        for name, seen in row["contenders"].items():
            ratio = "" if name == OURS else f"{seen['over_ours']:.3f}"
            values = str(row["prompt_tokens"]), name, f"{seen['first_token_ms']:.4g}", ratio
            result.add_row(*values, end_section=name == last)
    return result
