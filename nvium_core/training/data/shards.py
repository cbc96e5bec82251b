"""A corpus as shards of tokens, which the processes of a run write together: file n by process n mod their number.

The stream is that of the files in order of their names, whatever the number of processes.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from nvium_core.training.data.corpus import corpus_files, file_documents
from nvium_core.training.data.encoding import encoded
from nvium_core.training.data.windows import Tokens
from nvium_core.training.distributed import Processes

MAX_SHARD_TOKENS = 2**24


def write_shards(
    data: Path, max_tokens: int, tokenizer: PreTrainedTokenizerBase, folder: Path, processes: Processes
) -> int:
    """The first `max_tokens` tokens of a corpus, to an empty folder; their number. Every process must call it.

    Each has a file at a time, and none is read after as many tokens have been written.
    """
    files, num_tokens = corpus_files(data), 0
    for first in range(0, len(files), processes.count):
        number, written, left = first + processes.rank, 0, max_tokens - num_tokens
        for path in files[number : number + 1]:
            is_followed = path is not files[-1]
            parts = encoded(file_documents(path), tokenizer, left, is_followed=is_followed)
            written = write_file(joined(parts), folder, number)
        num_tokens += processes.sum(written)
        if num_tokens >= max_tokens:
            break
    if processes.is_first and num_tokens > max_tokens:
        cut(folder, max_tokens)
    processes.wait()
    return min(num_tokens, max_tokens)


def write_file(shards: Iterable[Tokens], folder: Path, number: int) -> int:
    """The shards of one of the corpus's files; how many tokens they are."""
    num_tokens = 0
    for part, shard in enumerate(shards):
        np.save(folder / f"{number:06}-{part:06}.npy", shard)
        num_tokens += len(shard)
    return num_tokens


def joined(parts: Iterable[Tokens]) -> Iterator[Tokens]:
    """The parts joined to at least `MAX_SHARD_TOKENS`, except the last."""
    waiting, count = list[Tokens](), 0
    for part in parts:
        waiting.append(part)
        count += len(part)
        if count >= MAX_SHARD_TOKENS:
            yield np.concatenate(waiting)
            waiting, count = [], 0
    if waiting:
        yield np.concatenate(waiting)


def cut(folder: Path, max_tokens: int) -> None:
    """Leave the first tokens: processes do not know what others are reading."""
    for path in sorted(folder.iterdir()):
        shard = np.load(path, mmap_mode="r")
        if max_tokens <= 0:
            path.unlink()
        elif len(shard) > max_tokens:
            kept = shard[:max_tokens].copy()
            path.unlink()
            np.save(path, kept)
        max_tokens -= len(shard)
