"""Packed windows of a token stream, as batches.

A batch depends on (stream, seed, step) only, so a resumed run sees the same batches.

Shapes: B windows, T tokens.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nvium_core.training.data.documents import DataError

Tokens = NDArray[np.unsignedinteger[Any]]
"""16 bits where the vocabulary allows."""


@dataclass(frozen=True)
class Batch:
    """Packed windows: inputs, next-token targets, positions counted from each document's start, document numbers, and
    which of the targets count in the loss (bool), all [B, T].

    `is_causal`: no counted row follows another document in its window, so attention needs no mask.
    """

    inputs: Tensor
    targets: Tensor
    positions: Tensor
    documents: Tensor
    counted: Tensor
    is_causal: bool = False

    def to(self, device: torch.device) -> "Batch":
        """Asynchronous on a GPU."""
        parts = (self.inputs, self.targets, self.positions, self.documents, self.counted)
        pinned = (x.pin_memory() if device.type == "cuda" else x for x in parts)
        inputs, targets, positions, documents, counted = (x.to(device, non_blocking=True) for x in pinned)
        return Batch(inputs, targets, positions, documents, counted, self.is_causal)

    def mask(self) -> Tensor | None:
        """[B, 1, T, T], True where row t may see row s: s is not later and in the same document. None is causal, which
        flash attention needs."""
        if self.is_causal:
            return None
        same_document = self.documents[:, :, None] == self.documents[:, None, :]
        return same_document.tril()[:, None]


class ShardedTokens:
    """Several token files read as one."""

    def __init__(self, shards: Sequence[Tokens]) -> None:
        self.shards = shards
        self.ends = np.cumsum([len(shard) for shard in shards]).tolist()

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitem__(self, place: slice) -> Tokens:
        """Tokens start … stop − 1, possibly of several shards."""
        parts = list[Tokens]()
        for number in range(bisect_right(self.ends, place.start), len(self.shards)):
            begun = self.ends[number] - len(self.shards[number])
            if begun >= place.stop:
                break
            parts.append(self.shards[number][max(0, place.start - begun) : place.stop - begun])
        return np.concatenate(parts)


class Windows(Protocol):
    """An endless sequence of windows that can be read from anywhere."""

    def batch(self, first_window: int, num_windows: int, context: int) -> Batch:
        """Windows first_window … first_window + num_windows − 1."""

    def num_windows(self, context: int) -> int:
        """Windows per epoch."""


@dataclass(frozen=True)
class PackedStream:
    """A token stream cut into windows, in an order that depends on the seed only."""

    tokens: Tokens | ShardedTokens
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
        """Windows per epoch. Raises `DataError` if there are not enough tokens for one."""
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
    """The image of index under a fixed pseudo-random permutation of range(count): an affine map by a unit of
    Z/count."""
    rng = np.random.default_rng((*seed, count))
    stride = int(rng.integers(1, count + 1))
    while np.gcd(stride, count) != 1:
        stride += 1
    return (index * stride + int(rng.integers(0, count))) % count


def packed_batch(inputs: Tensor, targets: Tensor, end_token: int) -> Batch:
    """Each end-of-text token begins a document: position 0, and it does not see earlier tokens."""
    starts = inputs == end_token
    index = torch.arange(inputs.shape[1]).expand_as(inputs)
    last_start = torch.where(starts, index, 0).cummax(dim=1).values
    return Batch(inputs, targets, index - last_start, starts.cumsum(dim=1), torch.ones_like(starts))
