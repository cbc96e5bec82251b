"""Batches of windows of a token stream.

The batch of a step depends only on the stream and the seed, so a resumed run reads the same batches.

Shapes: B windows, T tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from nvium_core.model.llama import Attend, causal_attention, document_attention
from nvium_core.model.plan import LayerCall
from nvium_core.training.errors import TrainingError

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
        return self._each(lambda x: x.to(device, non_blocking=True))

    def pinned_for(self, device: torch.device) -> "Batch":
        return self._each(Tensor.pin_memory) if device.type == "cuda" else self

    def _each(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        return Batch(*map(change, vars(self).values()))

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


class Windows(Protocol):
    """An endless, randomly accessible sequence of windows."""

    def batch(self, first_window: int, num_windows: int, context: int) -> Batch:
        """Return `num_windows` consecutive windows, starting at window `first_window`."""

    def num_windows(self, context: int) -> int:
        """Return the number of windows per epoch."""


@dataclass(frozen=True)
class PackedStream:
    """Windows of a token stream, shuffled by a seed."""

    tokens: Tokens
    end_token: int
    seed: int = 0

    def batch(self, first_window: int, num_windows: int, context: int) -> Batch:
        per_epoch = self.num_windows(context)
        numbers = range(first_window, first_window + num_windows)
        windows = [self._window(n // per_epoch, n % per_epoch, per_epoch, context) for n in numbers]
        window_BT = torch.from_numpy(np.stack(windows).astype(np.int64))
        return packed_batch(window_BT[:, :-1], window_BT[:, 1:], self.end_token)

    def num_windows(self, context: int) -> int:
        return (len(self.tokens) - 1) // context

    def _window(self, epoch: int, index: int, per_epoch: int, context: int) -> Tokens:
        rng = np.random.default_rng((self.seed, context, epoch))
        shift = int(rng.integers(0, len(self.tokens) - per_epoch * context))
        start = shift + permuted(index, per_epoch, (self.seed, epoch)) * context
        return self.tokens[start : start + context + 1]


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
