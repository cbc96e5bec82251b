"""Tokenize a corpus in all processes of a run, and join the parts to one file.

Of n processes, process r tokenizes files r, r + n, r + 2n and so on. Parts are joined in the order of the files, so the
token stream does not depend on n.
"""

from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from nvium_core.training.data.corpus import corpus_files, file_documents
from nvium_core.training.data.encoding import encoded
from nvium_core.training.distributed import Processes


def write_parts(
    data: Path, max_tokens: int, tokenizer: PreTrainedTokenizerBase, folder: Path, processes: Processes
) -> int:
    """Write at least the first `max_tokens` tokens of a corpus to an empty folder, if it has as many.

    Return the number of tokens written, but at most `max_tokens`. Every process must call this. In each round, every
    process tokenizes one file. The rounds end when there are `max_tokens` tokens.
    """
    files, num_tokens = corpus_files(data), 0
    for first in range(0, len(files), processes.count):
        number, written, left = first + processes.rank, 0, max_tokens - num_tokens
        if number < len(files):
            documents, is_followed = file_documents(files[number]), number < len(files) - 1
            for part, tokens in enumerate(encoded(documents, tokenizer, left, is_followed=is_followed)):
                np.save(folder / f"{number:06}-{part:09}.npy", tokens)
                written += len(tokens)
        num_tokens += processes.sum(written)
        if num_tokens >= max_tokens:
            break
    return min(num_tokens, max_tokens)


def join_parts(folder: Path, num_tokens: int, file: Path) -> None:
    """Move the first `num_tokens` tokens of a folder's parts to an .npy file, part by part."""
    paths = sorted(folder.iterdir())
    kind = np.lib.format.dtype_to_descr(np.load(paths[0]).dtype)
    with file.open("wb") as joined:
        header = {"descr": kind, "fortran_order": False, "shape": (num_tokens,)}
        np.lib.format.write_array_header_1_0(joined, header)
        for path in paths:
            part = np.load(path)[:num_tokens]
            part.tofile(joined)
            path.unlink()
            num_tokens -= len(part)
