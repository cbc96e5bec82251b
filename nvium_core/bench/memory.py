"""How much of the key/value cache that sequences own is unused, with sequences of all lengths.

A sequence owns whole pages, so its last one may be partly empty. Pages without any row are waste beyond that.
"""

import random
from collections.abc import Iterable
from collections.abc import Sequence as Items

from rich.progress import track
from rich.table import Table

from nvium_core.bench.harness import Figures, Request, Subject, shown
from nvium_core.engine.device.memory import page_bytes
from nvium_core.engine.engine import Engine
from nvium_core.engine.params import SamplingParams
from nvium_core.engine.schedule.sequence import Sequence

MAX_PROMPT_TOKENS, MIN_PROMPT_TOKENS = 600, 10
MIN_ANSWER_TOKENS = 16
MAX_WASTE_SHARE = 0.05
"""Largest share of needed bytes that may be owned beyond a partly filled page each."""


def measure(subject: Subject, *, sequences: Items[int] = (64,), tokens: int = 200, every: int = 50) -> Figures:
    """A row for each number of sequences. Answers have at most `tokens`; samples are taken every `every` Steps."""
    return {"tokens": tokens, "rows": [run(subject, number, tokens, every) for number in sequences]}


def run(subject: Subject, num_sequences: int, longest_answer: int, every: int) -> Figures:
    requests = mixed_requests(subject, num_sequences, longest_answer)
    page_size = 16
    pages = sum(-(-(len(prompt) + params.max_tokens) // page_size) + 2 for prompt, params in requests)
    engine = subject.engine(max_sequences=num_sequences, page_size=page_size, cache_tokens=pages * page_size)
    for number, (prompt, params) in enumerate(requests):
        engine.add(str(number), prompt, params)
    samples = list(track(_samples(engine, every), f"{num_sequences} sequences", transient=True, total=None))
    worst = max(samples, key=lambda sample: sample["waste_beyond_a_page_share"])
    return {
        "sequences": num_sequences,
        "page_bytes": page_bytes(subject.model.config, page_size, subject.model.dtype),
        "worst_waste_share": max(sample["waste_share"] for sample in samples),
        "worst_waste_beyond_a_page_share": worst["waste_beyond_a_page_share"],
        "is_within_target": worst["waste_beyond_a_page_share"] <= MAX_WASTE_SHARE,
        "most_owned_bytes": max(sample["owned_bytes"] for sample in samples),
        "most_full_context_bytes": max(sample["full_context_bytes"] for sample in samples),
        "preemptions": engine.scheduler.num_preemptions,
        "samples": samples,
    }


def mixed_requests(subject: Subject, count: int, longest_answer: int) -> list[Request]:
    """All lengths that the context allows."""
    draws = random.Random(0)
    longest_answer = min(longest_answer, subject.context // 2)
    longest_prompt = min(MAX_PROMPT_TOKENS, subject.context - longest_answer)
    requests = []
    for number in range(count):
        prompt_length = draws.randint(min(MIN_PROMPT_TOKENS, longest_prompt), longest_prompt)
        answer_length = draws.randint(min(MIN_ANSWER_TOKENS, longest_answer), longest_answer)
        params = SamplingParams(max_tokens=answer_length, seed=number, ignore_eos=True)
        requests.append((subject.random_tokens(prompt_length, number), params))
    return requests


def _samples(engine: Engine, every: int) -> Iterable[Figures]:
    """While any sequence has rows."""
    num_steps = 0
    while engine.has_work:
        engine.step()
        num_steps += 1
        if num_steps % every == 0 and any(sequence.filled[0] for sequence in engine.scheduler.running):
            yield sample(engine, num_steps)


def sample(engine: Engine, num_steps: int) -> Figures:
    """Bytes owned, needed, and reserved if each sequence had a full context."""
    running, page_size = engine.scheduler.running, engine.pool.page_size
    bytes_each = engine.cache_size.num_bytes // engine.cache_size.num_pages
    rows_used = rows_by_page(running, page_size)
    owned = len(rows_used) * bytes_each
    needed = sum(rows_used.values()) * bytes_each // page_size
    empty = sum(rows == 0 for rows in rows_used.values()) * bytes_each
    return {
        "step": num_steps,
        "running": len(running),
        "owned_bytes": owned,
        "needed_bytes": needed,
        "waste_share": (owned - needed) / needed,
        "waste_beyond_a_page_share": empty / needed,
        "full_context_bytes": len(running) * engine.pool.num_pages_for(engine.context) * bytes_each,
    }


def rows_by_page(sequences: Iterable[Sequence], page_size: int) -> dict[int, int]:
    """Rows in each owned page; a shared page counts once."""
    rows_used: dict[int, int] = {}
    for sequence in sequences:
        for index, page in enumerate(sequence.pages):
            rows = min(max(sequence.filled[0] - index * page_size, 0), page_size)
            rows_used[page] = max(rows_used.get(page, 0), rows)
    return rows_used


def table(figures: Figures) -> Table:
    names = "worst_waste_share", "worst_waste_beyond_a_page_share", "most_owned_bytes", "most_full_context_bytes"
    columns = "sequences", "worst waste", "beyond a page each", "most bytes owned", "with full contexts"
    result = Table(*columns, caption="Shares of the bytes needed.")
    for row in figures["rows"]:
        result.add_row(str(row["sequences"]), *(shown(row[name]) for name in names))
    return result
