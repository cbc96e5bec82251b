"""What a Step of each block costs by its rows, learnt while serving; `nvium plan --costs` reads the file."""

import random
from collections.abc import Iterable, Iterator, Sequence
from itertools import count, islice
from statistics import geometric_mean

from rich.progress import track
from rich.table import Table

from nvium_core.bench.harness import Figures, Request, Subject, pointwise
from nvium_core.engine.engine import Engine
from nvium_core.engine.params import SamplingParams
from nvium_core.engine.schedule.costs import StepCosts

AT_ONCE = (1, 2, 4, 8, 16, 32)
"""Concurrent sequences, phase by phase."""


def measure(
    subject: Subject, *, requests: int = 300, prompt_tokens: Sequence[int] = (8, 128), tokens: int = 48
) -> Figures:
    """Seconds by block and rows, as `StepCosts.from_dict` reads them, and the fit a_k + b_k·r in milliseconds.

    Calibration measures each Step alone, with cold caches. Serving `requests` requests measures them in sequence; the
    result is the mean over few and many concurrent sequences. Prompt lengths are between the smallest and the largest
    of `prompt_tokens`, answers between half and one and a half times `tokens`.
    """
    engine = subject.engine()
    costs, learnt = engine.calibrate(), []
    asked = questions(subject, (min(prompt_tokens), max(prompt_tokens)), tokens)
    for at_once in track(AT_ONCE, "learning", transient=True):
        work(engine, islice(asked, -(-requests // len(AT_ONCE))), at_once)
        learnt.append(costs.copy())
    passes = {rows: geometric_mean([each.passes[rows] for each in learnt]) for rows in costs.passes}
    costs = StepCosts(pointwise(geometric_mean, learnt), costs.junctions, costs.own, passes)
    return {
        **costs.as_dict(),
        "requests": requests,
        "prompt_tokens": list(prompt_tokens),
        "tokens": tokens,
        "fixed_ms": [1000 * seconds for seconds in costs.fixed],
        "per_row_ms": [1000 * seconds for seconds in costs.per_row],
    }


def questions(subject: Subject, prompt_tokens: tuple[int, int], tokens: int) -> Iterator[Request]:
    """Random prompts without end."""
    draws, most = random.Random(0), subject.context // 2
    for number in count():
        prompt = subject.random_tokens(min(draws.randint(*prompt_tokens), most), number)
        max_tokens = min(draws.randint(max(1, tokens // 2), tokens + tokens // 2), most)
        yield prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=number)


def work(engine: Engine, requests: Iterable[Request], at_once: int) -> None:
    """Serve the requests, `at_once` of them concurrently."""
    for number, request in enumerate(requests):
        while len(engine.scheduler.running) + len(engine.scheduler.waiting) >= at_once:
            engine.step()
        engine.add(str(number), *request)
    while engine.has_work:
        engine.step()


def table(figures: Figures) -> Table:
    blocks = figures["blocks"]
    columns = "rows", *(f"block {number}" for number in range(1, len(blocks) + 1))
    result = Table(*columns, caption="Milliseconds, and the fit of fixed and per row.")
    for rows in blocks[0]:
        result.add_row(rows, *(f"{1000 * block[rows]:.3f}" for block in blocks))
    for name in "fixed", "per_row":
        result.add_row(name.replace("_", " "), *(f"{value:.3f}" for value in figures[f"{name}_ms"]))
    return result
