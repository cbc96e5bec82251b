"""What a Step of each block costs by its rows, as learnt at work; the file serves `nvium plan --costs`."""

import random
from collections.abc import Iterator
from collections.abc import Sequence as Items
from itertools import cycle, repeat

from rich.progress import track
from rich.table import Table

from nvium_core.bench.harness import Figures, Subject
from nvium_core.engine.engine import Engine
from nvium_core.engine.params import SamplingParams

AT_ONCE = (8, 1, 16, 2, 4)
"""Sequences, one after another."""

REQUESTS_OF_EACH = 12


def measure(
    subject: Subject, *, requests: int = 256, prompt_tokens: Items[int] = (8, 128), tokens: int = 48
) -> Figures:
    """Seconds by block and rows, as `StepCosts.from_dict` reads them, and the fit a_k + b_k·r in milliseconds.

    Calibration finds every Step's cost on its own, with cold caches; by answering so many requests the engine learns
    what they cost one after another. Prompts are as long as the least of `prompt_tokens`, the largest or anything
    between, answers have half to one and a half times `tokens`.
    """
    engine = subject.engine()
    costs = engine.calibrate()
    work(engine, subject, requests, (min(prompt_tokens), max(prompt_tokens)), tokens)
    return {
        **costs.as_dict(),
        "requests": requests,
        "prompt_tokens": list(prompt_tokens),
        "tokens": tokens,
        "fixed_ms": [1000 * seconds for seconds in costs.fixed],
        "per_row_ms": [1000 * seconds for seconds in costs.per_row],
    }


def work(engine: Engine, subject: Subject, num_requests: int, prompt_tokens: tuple[int, int], tokens: int) -> None:
    """Answer random prompts, one begun when another ends; now more, now fewer of them at once."""
    draws, most = random.Random(0), subject.context // 2
    numbers = track(range(num_requests), "learning", transient=True)
    for number, at_once in zip(numbers, cycle(for_a_while(AT_ONCE)), strict=False):
        while len(engine.scheduler.running) + len(engine.scheduler.waiting) >= at_once:
            engine.step()
        prompt = subject.random_tokens(min(draws.randint(*prompt_tokens), most), number)
        max_tokens = min(draws.randint(max(1, tokens // 2), tokens + tokens // 2), most)
        engine.add(str(number), prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=number))
    while engine.has_work:
        engine.step()


def for_a_while(numbers: Items[int]) -> Iterator[int]:
    """Each of them for as many requests as it has at once, and some more."""
    for number in numbers:
        yield from repeat(number, REQUESTS_OF_EACH + number)


def table(figures: Figures) -> Table:
    blocks = figures["blocks"]
    columns = "rows", *(f"block {number}" for number in range(1, len(blocks) + 1))
    result = Table(*columns, caption="Milliseconds, and the fit of fixed and per row.")
    for rows in blocks[0]:
        result.add_row(rows, *(f"{1000 * block[rows]:.3f}" for block in blocks))
    for name in "fixed", "per_row":
        result.add_row(name.replace("_", " "), *(f"{value:.3f}" for value in figures[f"{name}_ms"]))
    return result
