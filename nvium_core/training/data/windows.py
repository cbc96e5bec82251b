"""Batches of windows of training tokens: of a token stream, or of packed conversations.

The batch of a step depends only on the tokens and the seed, so a resumed run reads the same batches.

Shapes: B windows, T tokens, F tensors of a `Batch`.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from nvium_core.errors import DataError, TrainingError
from nvium_core.model.llama import Attend, causal_attention, document_attention
from nvium_core.model.plan import LayerCall
from nvium_core.training.data.texts import Example

Tokens = NDArray[np.unsignedinteger[Any]]
"""Token ids: uint16 if the vocabulary has at most 2¹⁶ tokens, else uint32."""


@dataclass(frozen=True)
class Batch:
    """Windows of documents. All tensors are [B, T].

    `targets` are the next tokens. `positions` count from the start of each document. `documents` numbers the documents
    within a window. `counted` is True for targets that count in the loss.
    """

    inputs: Tensor
    targets: Tensor
    positions: Tensor
    documents: Tensor
    counted: Tensor

    def to(self, device: torch.device) -> "Batch":
        """Copy the batch to a device, asynchronously if it is in pinned memory."""
        return Batch(*(x.to(device, non_blocking=True) for x in vars(self).values()))

    def pinned_for(self, device: torch.device) -> "Batch":
        return Batch(*(x.pin_memory() for x in vars(self).values())) if device.type == "cuda" else self

    def attention(self) -> Attend:
        """Return attention within documents without a mask, except compiled on a CPU or not compiled on a GPU.

        On a CPU, attention document by document takes half the time of a mask.
        """
        is_on_cpu, is_compiling = self.inputs.device.type == "cpu", torch.compiler.is_compiling()
        if is_on_cpu == is_compiling:
            return causal_attention(self.mask())
        if is_compiling:
            return flex_attention_by(self.documents)
        places_BT = self.documents + torch.arange(len(self.documents))[:, None] * (self.documents.max() + 1)
        return document_attention(places_BT.unique_consecutive(return_counts=True)[1].tolist())

    def mask(self) -> Tensor:
        """Return the attention mask [B, 1, T, T], where row t may attend to earlier rows of its document and itself."""
        same_document = self.documents[:, :, None] == self.documents[:, None, :]
        return same_document.tril()[:, None]


def flex_attention_by(documents_BT: Tensor) -> Attend:
    """Return causal attention within each document by FlexAttention, which skips blocks of other documents.

    It is fast only inside a compiled function on a GPU, and has no gradients on a CPU.
    """
    num_windows, num_rows = documents_BT.shape

    def is_seen(window: Tensor, _head: Tensor, row: Tensor, other: Tensor) -> Tensor:
        return (row >= other) & (documents_BT[window, row] == documents_BT[window, other])

    blocks = create_block_mask(is_seen, num_windows, None, num_rows, num_rows, device=documents_BT.device)

    def attend(q_BTHP: Tensor, k_BTGP: Tensor, v_BTGP: Tensor, call: LayerCall) -> Tensor:
        if call.window is not None:
            raise TrainingError("models with sliding windows train on a CPU only")
        q_BHTP, k_BGTP, v_BGTP = (x.transpose(1, 2).to(v_BTGP.dtype) for x in (q_BTHP, k_BTGP, v_BTGP))
        grouped = q_BHTP.shape[1] != k_BGTP.shape[1]
        return flex_attention(q_BHTP, k_BGTP, v_BGTP, block_mask=blocks, enable_gqa=grouped).transpose(1, 2)

    return attend


@dataclass(frozen=True)
class PackedStream:
    """Windows of `context` tokens of a token stream, shuffled by a seed."""

    tokens: Tokens
    end_token: int
    context: int
    seed: int = 0

    @property
    def num_windows(self) -> int:
        """The number of windows per epoch."""
        return (len(self.tokens) - 1) // self.context

    def batch(self, first_window: int, num_windows: int) -> Batch:
        """Return `num_windows` consecutive windows, starting at window `first_window` of an endless sequence."""
        numbers = range(first_window, first_window + num_windows)
        windows = [self._window(*divmod(number, self.num_windows)) for number in numbers]
        window_BT = torch.from_numpy(np.stack(windows).astype(np.int64))
        return packed_batch(window_BT[:, :-1], window_BT[:, 1:], self.end_token)

    def _window(self, epoch: int, index: int) -> Tokens:
        rng = np.random.default_rng((self.seed, self.context, epoch))
        shift = int(rng.integers(0, len(self.tokens) - self.num_windows * self.context))
        start = shift + permuted(index, self.num_windows, (self.seed, epoch)) * self.context
        return self.tokens[start : start + self.context + 1]


def permuted(index: int, count: int, seed: tuple[int, ...]) -> int:
    """Map an index by a pseudo-random permutation of range(count): an affine map modulo `count`."""
    rng = np.random.default_rng((*seed, count))
    stride = int(rng.integers(1, count + 1))
    while np.gcd(stride, count) != 1:
        stride += 1
    return (index * stride + int(rng.integers(0, count))) % count


def packed_batch(inputs: Tensor, targets: Tensor, end_token: int) -> Batch:
    """Build a batch in which every end-of-text token begins a new document at position 0."""
    starts = inputs == end_token
    index = torch.arange(inputs.shape[1]).expand_as(inputs)
    last_start = torch.where(starts, index, 0).cummax(dim=1).values
    return Batch(inputs, targets, index - last_start, starts.cumsum(dim=1), torch.ones_like(starts))


class PackedConversations:
    """Windows of `context` tokens of examples, shuffled by a seed. Only answers count in the loss."""

    def __init__(self, examples: Sequence[Example], end_token: int, context: int, seed: int = 0) -> None:
        """Raise `DataError` if an example is longer than the context."""
        self.examples, self.end_token, self.context, self.seed = examples, end_token, context, seed
        self._windows = packed([len(example) - 1 for example in examples], context)

    @property
    def num_windows(self) -> int:
        """The number of windows per epoch."""
        return len(self._windows)

    def batch(self, first_window: int, num_windows: int) -> Batch:
        """Return `num_windows` consecutive windows, starting at window `first_window` of an endless sequence.

        Windows are padded with end-of-text tokens, which do not count in the loss.
        """
        numbers = (divmod(n, self.num_windows) for n in range(first_window, first_window + num_windows))
        places = [permuted(index, self.num_windows, (self.seed, epoch)) for epoch, index in numbers]
        window_BFT = torch.from_numpy(np.stack([self._window(self._windows[place]) for place in places]))
        inputs_BT, targets_BT, positions_BT, documents_BT, counted_BT = window_BFT.unbind(1)
        return Batch(inputs_BT, targets_BT, positions_BT, documents_BT, counted_BT.bool())

    def _window(self, numbers: Sequence[int]) -> NDArray[np.int64]:
        """Return a window's tensors [F, T] in the order of `Batch`. An example's last token is never an input."""
        window_FT = np.full((5, self.context), self.end_token)
        inputs_T, targets_T, positions_T, documents_T, counted_T = window_FT
        positions_T[:], documents_T[:], counted_T[:] = np.arange(self.context), len(numbers), False
        start = 0
        for document, number in enumerate(numbers):
            example = self.examples[number]
            rows = slice(start, start := start + len(example) - 1)
            inputs_T[rows], targets_T[rows] = example.tokens[:-1], example.tokens[1:]
            positions_T[rows], documents_T[rows] = np.arange(len(example) - 1), document
            counted_T[rows] = example.is_answer[1:]
        return window_FT


def packed(num_rows: Sequence[int], context: int) -> list[list[int]]:
    """Pack examples into windows by best-fit decreasing. Return, for each window, the indices of its examples.

    Raise `DataError` if an example exceeds the context.
    """
    if max(num_rows) > context:
        raise DataError(f"a conversation of {max(num_rows) + 1} tokens is too long for a context of {context} tokens")
    windows = list[list[int]]()
    rooms = list[tuple[int, int]]()  # (free rows, index of the window), sorted
    for number in sorted(range(len(num_rows)), key=num_rows.__getitem__, reverse=True):
        place = bisect_left(rooms, (num_rows[number], 0))
        if place < len(rooms):
            room, window = rooms.pop(place)
        else:
            room, window = context, len(windows)
            windows.append([])
        windows[window].append(number)
        insort(rooms, (room - num_rows[number], window))
    return windows


Windows = PackedStream | PackedConversations
