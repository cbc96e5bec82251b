"""Text to batches: documents, the diet (who is read how often), the token stream and its packed windows.

Text is UTF-8, plain or .xz, documents separated by a line `<|endoftext|>`. A batch depends on (stream, seed, step)
only, so a resumed run sees exactly what an uninterrupted one would have seen.
Shapes: B windows, T tokens.
"""

import lzma
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from nvium_core.errors import NviumError

END_OF_TEXT = "<|endoftext|>"
COMMON_WORDS = 1000
WORD = re.compile(r"[a-z']+")

Tokens = NDArray[np.unsignedinteger[Any]]
"""In 16 bits where the vocabulary allows it."""


class DataError(NviumError, ValueError):
    """Text that cannot be used; the message names the file."""


def read_documents(path: Path) -> list[str]:
    """The documents of a text file."""
    try:
        with (lzma.open if path.suffix == ".xz" else open)(path, "rt", encoding="utf-8-sig") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError, lzma.LZMAError, EOFError) as error:
        raise DataError(f"{path}: {error}") from error
    documents = [
        document.strip("\n") for document in re.split(rf"^{re.escape(END_OF_TEXT)}$", text, flags=re.MULTILINE)
    ]
    documents = [document for document in documents if document]
    if not documents:
        raise DataError(f"{path}: no documents")
    return documents


def simplicity(documents: Sequence[str]) -> NDArray[np.float64]:
    """Per document the share of its words that are among the corpus's 1,000 commonest."""
    counts = [Counter(WORD.findall(document.lower())) for document in documents]
    common = {word for word, _ in sum_counts(counts).most_common(COMMON_WORDS)}
    return np.array([sum(n for word, n in c.items() if word in common) / max(1, c.total()) for c in counts])


def sum_counts(counts: Sequence[Counter[str]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for each in counts:
        total.update(each)
    return total


@dataclass(frozen=True, kw_only=True)
class Diet:
    """How often a document is read, in epochs: the simple ones and the others.

    Simple are those up to `short_characters` long and the simplest `simple_share` of all characters. A share of the
    readings leaves out the title, a first line that stands alone, so that a prompt need not begin with one.
    """

    simple_share: float = 0.0
    short_characters: int = 0
    simple_epochs: float = 1.0
    other_epochs: float = 1.0
    untitled_share: float = 0.0

    def __post_init__(self) -> None:
        if min(self.simple_epochs, self.other_epochs) < 0 or max(self.simple_epochs, self.other_epochs) == 0:
            raise ValueError("simple_epochs and other_epochs must not be negative, nor both 0")

    def readings(self, documents: Sequence[str], seed: int) -> list[str]:
        """The documents in reading order."""
        rng = np.random.default_rng(seed)
        order = self.order(documents, rng)
        untitled = rng.random(len(order)) < self.untitled_share
        return [without_title(documents[i]) if bare else documents[i] for i, bare in zip(order, untitled, strict=True)]

    def order(self, documents: Sequence[str], rng: np.random.Generator) -> NDArray[np.int64]:
        """The numbers of the documents in reading order."""
        times = np.floor(self._epochs(documents) + rng.random(len(documents))).astype(int)
        return rng.permutation(np.repeat(np.arange(len(documents)), times))

    def _epochs(self, documents: Sequence[str]) -> NDArray[np.float64]:
        simplest_first = np.argsort(-simplicity(documents), kind="stable")
        lengths = np.array([len(document) for document in documents])[simplest_first]
        is_simple = np.empty(len(documents), dtype=bool)
        is_simple[simplest_first] = lengths.cumsum() <= self.simple_share * lengths.sum()
        is_simple[simplest_first] |= lengths <= self.short_characters
        return np.where(is_simple, self.simple_epochs, self.other_epochs)


def without_title(document: str) -> str:
    """The document less its first line, where that line stands alone above a blank one."""
    title, blank, text = document.partition("\n\n")
    return text if blank and "\n" not in title else document


def encode(documents: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> Tokens:
    """One stream: every document behind its end-of-text token, and one more at the end."""
    end = tokenizer.eos_token_id
    encodings = tokenizer(list(documents), add_special_tokens=False, split_special_tokens=True, verbose=False)
    stream = [token for ids in encodings["input_ids"] for token in (end, *ids)]
    return np.array([*stream, end], dtype=np.uint16 if len(tokenizer) <= 2**16 else np.uint32)


@dataclass(frozen=True)
class Batch:
    """Packed windows: inputs, next-token targets, positions counted from each document's start, document numbers, and
    which of the targets count in the loss (bool).

    All [B, T].
    """

    inputs: Tensor
    targets: Tensor
    positions: Tensor
    documents: Tensor
    counted: Tensor

    def to(self, device: torch.device) -> "Batch":
        """The same on another device, without waiting for it where it is a GPU."""
        parts = (self.inputs, self.targets, self.positions, self.documents, self.counted)
        pinned = (x.pin_memory() if device.type == "cuda" else x for x in parts)
        return Batch(*(x.to(device, non_blocking=True) for x in pinned))

    def mask(self) -> Tensor:
        """[B, 1, T, T], True where row t may see row s: not later, and of the same document."""
        same_document = self.documents[:, :, None] == self.documents[:, None, :]
        return same_document.tril()[:, None]


class Windows(Protocol):
    """What a run reads: an endless sequence of windows that can be begun anywhere."""

    def batch(self, first_window: int, num_windows: int, context: int) -> Batch:
        """Windows first_window … first_window + num_windows − 1."""

    def num_windows(self, context: int) -> int:
        """Windows per epoch."""


@dataclass(frozen=True)
class PackedStream:
    """A token stream cut into windows, drawn in an order that depends on the seed alone."""

    tokens: Tokens
    end_token: int
    seed: int = 0

    def batch(self, first_window: int, num_windows: int, context: int) -> Batch:
        """Windows first_window … first_window + num_windows − 1 of the endless shuffled sequence of windows."""
        per_epoch = self.num_windows(context)
        numbers = range(first_window, first_window + num_windows)
        windows = [self._window(n // per_epoch, n % per_epoch, per_epoch, context) for n in numbers]
        window_BT = torch.from_numpy(np.stack(windows).astype(np.int64))
        return packed_batch(window_BT[:, :-1], window_BT[:, 1:], self.end_token)

    def num_windows(self, context: int) -> int:
        """The windows of one reading of the stream. Raises `DataError` if it has not enough tokens for one."""
        count = (len(self.tokens) - 1) // context
        if count < 1:
            raise DataError(f"{len(self.tokens)} tokens of text are too few for a context of {context}")
        return count

    def _window(self, epoch: int, index: int, per_epoch: int, context: int) -> Tokens:
        shift = int(
            np.random.default_rng((self.seed, context, epoch)).integers(0, len(self.tokens) - per_epoch * context)
        )
        place = permuted(index, per_epoch, (self.seed, epoch))
        start = shift + place * context
        return self.tokens[start : start + context + 1]


def permuted(index: int, count: int, seed: tuple[int, ...]) -> int:
    """Where index goes in a fixed pseudo-random permutation of range(count): an affine map by a unit of Z/count."""
    rng = np.random.default_rng((*seed, count))
    stride = int(rng.integers(1, count + 1))
    while np.gcd(stride, count) != 1:
        stride += 1
    return (index * stride + int(rng.integers(0, count))) % count


def packed_batch(inputs: Tensor, targets: Tensor, end_token: int) -> Batch:
    """A batch in which each end-of-text token begins a document: position 0, and blind to all before it."""
    starts = inputs == end_token
    index = torch.arange(inputs.shape[1]).expand_as(inputs)
    last_start = torch.where(starts, index, 0).cummax(dim=1).values
    return Batch(inputs, targets, index - last_start, starts.cumsum(dim=1), torch.ones_like(starts))
