"""Runs the same rows through different implementations of blocks, and compares their caches."""

from collections.abc import Sequence as Items
from typing import Protocol

import torch
from hypothesis import strategies as st
from torch import Tensor

from nvium_core import SamplingParams
from nvium_core.engine.schedule.sequence import Sequence

NUM_PAGES = 24
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.06}


class CachedBlocks(Protocol):
    def carry(self, block: int, sequences: list[Sequence], rows: list[range]) -> None:
        """Run these rows of each sequence through the block."""

    @property
    def kept(self) -> list[Tensor]:
        """Return keys, values and hidden states."""


def sequences_of(lengths: list[int], vocab_size: int, page_size: int = 16) -> list[Sequence]:
    """Create sequences with random pages."""
    pages = iter(torch.randperm(NUM_PAGES, generator=torch.Generator().manual_seed(len(lengths))).tolist())
    made = []
    for number, length in enumerate(lengths):
        tokens = [(7 * number + 3 * t) % vocab_size for t in range(length)]
        sequence = Sequence(str(number), tokens, SamplingParams(), seed=0, num_blocks=1, arrival=number)
        sequence.pages = [next(pages) for _ in range(-(-length // page_size))]
        sequence.seat = number
        made.append(sequence)
    return made


def carry_five_by_five(sequences: list[Sequence], blocks: Items[CachedBlocks]) -> None:
    """Run all rows through two blocks, five at a time."""
    for block in range(2):
        for start in range(0, max(sequence.num_tokens for sequence in sequences), 5):
            rows = [range(start, min(start + 5, sequence.num_tokens)) for sequence in sequences]
            for each in blocks:
                each.carry(block, sequences, rows)


def carry_a_staircase(sequences: list[Sequence], blocks: Items[CachedBlocks], data: st.DataObject) -> None:
    """Run all rows through three blocks, in random Steps."""
    lengths = [sequence.num_tokens for sequence in sequences]
    done = [[0] * len(lengths) for _ in range(3)]
    while sum(done[-1]) < sum(lengths):
        block = data.draw(st.sampled_from([b for b in range(3) if sum(done[b]) < sum(done[b - 1] if b else lengths)]))
        limits = done[block - 1] if block else lengths
        most = data.draw(st.integers(1, 16))
        rows = [range(start, min(limit, start + most)) for start, limit in zip(done[block], limits, strict=True)]
        for each in blocks:
            each.carry(block, sequences, rows)
        done[block] = [max(start, own.stop) for start, own in zip(done[block], rows, strict=True)]


def assert_alike(found: CachedBlocks, expected: CachedBlocks, tolerance: float) -> None:
    for some, others in zip(found.kept, expected.kept, strict=True):
        torch.testing.assert_close(some, others, rtol=0, atol=tolerance)
