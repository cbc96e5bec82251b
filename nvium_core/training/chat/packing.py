"""Windows of training tokens. A window contains one conversation or several.

The batch of a step depends only on the examples and the seed, so a resumed run reads the same batches.

Shapes: B windows, T tokens, F tensors of a `Batch`.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray

from nvium_core.training.chat.examples import Example
from nvium_core.training.data.windows import Batch, permuted
from nvium_core.training.errors import DataError


class PackedConversations:
    """Windows of examples, shuffled by a seed. Only answers count in the loss."""

    def __init__(self, examples: Sequence[Example], end_token: int, seed: int = 0) -> None:
        self.examples, self.end_token, self.seed = examples, end_token, seed
        self._num_rows = tuple(len(example) - 1 for example in examples)

    def batch(self, first_window: int, num_windows: int, context: int) -> Batch:
        """Return `num_windows` consecutive windows, starting at window `first_window` of an endless shuffled sequence.

        Windows are padded with end-of-text tokens, which do not count in the loss. Raise `DataError` if an example is
        longer than the context.
        """
        windows = packed(self._num_rows, context)
        numbers = range(first_window, first_window + num_windows)
        places = [permuted(n % len(windows), len(windows), (self.seed, n // len(windows))) for n in numbers]
        window_BFT = torch.from_numpy(np.stack([self._window(windows[place], context) for place in places]))
        inputs_BT, targets_BT, positions_BT, documents_BT, counted_BT = window_BFT.unbind(1)
        return Batch(inputs_BT, targets_BT, positions_BT, documents_BT, counted_BT.bool())

    def num_windows(self, context: int) -> int:
        return len(packed(self._num_rows, context))

    def _window(self, numbers: Sequence[int], context: int) -> NDArray[np.int64]:
        """Return a window's tensors [F, T] in the order of `Batch`. An example's last token is never an input."""
        window_FT = np.full((5, context), self.end_token)
        inputs_T, targets_T, positions_T, documents_T, counted_T = window_FT
        positions_T[:], documents_T[:], counted_T[:] = np.arange(context), len(numbers), False
        start = 0
        for document, number in enumerate(numbers):
            example = self.examples[number]
            rows = slice(start, start := start + self._num_rows[number])
            inputs_T[rows], targets_T[rows] = example.tokens[:-1], example.tokens[1:]
            positions_T[rows], documents_T[rows] = np.arange(self._num_rows[number]), document
            counted_T[rows] = example.is_answer[1:]
        return window_FT


@cache
def packed(num_rows: tuple[int, ...], context: int) -> list[list[int]]:
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
