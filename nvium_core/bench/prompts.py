"""Time to first token by prompt length, for each contender of `peers`, in turns.

Our first token may exit early. So a turn generates one first token at each exit, and averages them weighted by the
routers' probabilities. Prefix caching is off.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import count
from statistics import median
from typing import get_args

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
            name: weighed(each, draws) if name in get_args(Schedule) else plain(each)
            for name, each in contenders.items()
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


def weighed(generate_turn: Contender, draws: Draws) -> Callable[[int], float]:
    """Seconds to the first token; the contender takes the seed as the turn's number."""

    def turn(number: int) -> float:
        seconds = [(probability, first_seconds(generate_turn, seed)) for seed, probability in draws.values()]
        return sum(p * each for p, each in seconds) / sum(p for p, _ in seconds)

    return turn


def plain(generate_turn: Contender) -> Callable[[int], float]:
    return lambda number: first_seconds(generate_turn, number)


def first_seconds(generate_turn: Contender, number: int) -> float:
    [seconds] = generate_turn(number).first_token_seconds
    return seconds


def summary(ours: Sequence[float], theirs: Sequence[float]) -> Figures:
    """Medians, and the median ratio to ours."""
    return {
        "first_token_ms": 1000 * median(theirs),
        "over_ours": median_ratio(theirs, ours),
        "turns_ms": [1000 * seconds for seconds in theirs],
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
