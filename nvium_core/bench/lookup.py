"""What prompt lookup, the speculative decoding of llama.cpp's Python package, gains over llama.cpp without it: one
sequence at temperature 0."""

import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from itertools import islice
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from rich.table import Table

from nvium_core.bench.contenders import llama_cpp
from nvium_core.bench.contenders.contender import NotAvailable
from nvium_core.bench.contenders.gguf_file import write_gguf
from nvium_core.bench.drafts import prompt
from nvium_core.bench.harness import Figures, Subject, interleaved, median_ratio
from nvium_core.bench.twin import dense_twin
from nvium_core.engine.params import require

DRAFTS = (2, 10)
"""How many tokens are drafted in a row: what the package advises for a CPU, and its default."""


class Turn(NamedTuple):
    token_ids: list[int]
    seconds: float


def measure(subject: Subject, *, tokens: int = 128, repeats: int = 6) -> Figures:
    """A row for each number of drafts. Of a model without exits, or of a dense twin, in float32."""
    try:
        llama_cpp.check_available(subject.model.device.type)
    except NotAvailable as reason:
        require(False, "experiment", f"lookup needs llama.cpp: {reason}")
    with TemporaryDirectory() as folder:
        write_gguf(dense_twin(subject.model, subject.weights), file := Path(folder, "model.gguf"), "f32")
        contenders: dict[str, Callable[[int], Turn]] = {
            str(number): partial(answer, opened(file, subject, tokens, number), subject, tokens)
            for number in (0, *DRAFTS)
        }
        turns = interleaved(contenders, repeats, "llama.cpp's prompt lookup")
    rows = [{"drafts": number, **gain(turns[str(number)], turns["0"])} for number in DRAFTS]
    return {"tokens": tokens, "repeats": repeats, "llama_cpp": llama_cpp.system_info(), "rows": rows}


def opened(file: Path, subject: Subject, tokens: int, num_drafts: int) -> Any:
    """A model in llama.cpp, with a float32 cache."""
    package, speculative = import_module("llama_cpp"), import_module("llama_cpp.llama_speculative")
    draft = speculative.LlamaPromptLookupDecoding(num_pred_tokens=num_drafts) if num_drafts else None
    threads, wide = torch.get_num_threads(), package.GGML_TYPE_F32
    context = tokens + max(map(len, subject.chats or [subject.prompt])) + 2 * max(DRAFTS)  # drafts need room too
    return package.Llama(
        str(file), n_ctx=context, n_threads=threads, n_threads_batch=threads, draft_model=draft, type_k=wide,
        type_v=wide, verbose=False,
    )  # fmt: skip


def answer(llama: Any, subject: Subject, tokens: int, turn: int) -> Turn:
    """Of the prompt that this turn has, to its end if it is a question."""
    started, found = time.perf_counter(), list[int]()
    for token in islice(llama.generate(prompt(subject, turn), temp=0.0), tokens):
        found.append(token)
        if subject.chats and token == subject.model.config.eos_token_id:
            break
    return Turn(found, time.perf_counter() - started)


def gain(drafted: list[Turn], plain: list[Turn]) -> Figures:
    rates = [[len(turn.token_ids) / turn.seconds for turn in turns] for turns in (drafted, plain)]
    in_all = [
        sum(len(turn.token_ids) for turn in turns) / sum(turn.seconds for turn in turns) for turns in (drafted, plain)
    ]
    pairs = zip(drafted, plain, strict=True)
    return {
        "tokens_per_second_lookup": median(rates[0]),
        "tokens_per_second_plain": median(rates[1]),
        "over_plain": median_ratio(*rates),
        "over_plain_in_all": in_all[0] / in_all[1],
        "equal_answers": sum(turn.token_ids == other.token_ids for turn, other in pairs),
    }


def table(figures: Figures) -> Table:
    result = Table("drafts in a row", "over llama.cpp without", "in all", "equal answers")
    for row in figures["rows"]:
        ratios = (f"{row[name]:.3g}" for name in ("over_plain", "over_plain_in_all"))
        result.add_row(str(row["drafts"]), *ratios, str(row["equal_answers"]))
    return result
