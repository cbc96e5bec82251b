"""Tokenize a corpus in all processes of a run, and write the tokens in shards.

Of n processes, process r tokenizes files r, r + n, r + 2n and so on. Shards are read in the order of the files, so the
token stream does not depend on n.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from nvium_core.training.data.corpus import corpus_files, file_documents
from nvium_core.training.data.encoding import encoded
from nvium_core.training.data.windows import Tokens
from nvium_core.training.distributed import Processes

SHARD_TOKENS = 2**24


def write_shards(
    data: Path, max_tokens: int, tokenizer: PreTrainedTokenizerBase, folder: Path, processes: Processes
) -> int:
    """Write the first `max_tokens` tokens of a corpus to an empty folder. Return the number of tokens written.

    Every process must call this. In each round, every process tokenizes one file. The rounds end when there are
    `max_tokens` tokens.
    """
    files, num_tokens = corpus_files(data), 0
    for first in range(0, len(files), processes.count):
        number, written, left = first + processes.rank, 0, max_tokens - num_tokens
        if number < len(files):
            documents, is_followed = file_documents(files[number]), number < len(files) - 1
            for part, shard in enumerate(joined(encoded(documents, tokenizer, left, is_followed=is_followed))):
                np.save(folder / f"{number:06}-{part:06}.npy", shard)
                written += len(shard)
        num_tokens += processes.sum(written)
        if num_tokens >= max_tokens:
            break
    if processes.is_first and num_tokens > max_tokens:
        truncate(folder, max_tokens)
    processes.wait()
    return min(num_tokens, max_tokens)


def joined(parts: Iterable[Tokens]) -> Iterator[Tokens]:
    """Join parts into shards of at least `SHARD_TOKENS` tokens. The last shard may be smaller."""
    waiting, count = list[Tokens](), 0
    for part in parts:
        waiting.append(part)
        count += len(part)
        if count >= SHARD_TOKENS:
            yield np.concatenate(waiting)
            waiting, count = [], 0
    if waiting:
        yield np.concatenate(waiting)


def truncate(folder: Path, max_tokens: int) -> None:
    """Delete all tokens after the first `max_tokens`. The last round of `write_shards` may write too many."""
    for path in sorted(folder.iterdir()):
        shard = np.load(path, mmap_mode="r")
        if max_tokens <= 0:
            path.unlink()
        elif len(shard) > max_tokens:
            kept = shard[:max_tokens].copy()
            path.unlink()
            np.save(path, kept)
        max_tokens -= len(shard)
