"""A sequence: its tokens, and the staircase of how far each block has got with them.

    block 4  ████████░░░░░░░░        filled = [16, 13, 13, 8], 16 tokens
    block 3  █████████████░░░        rows 8…12 wait for block 4, rows 13…15 for block 2.
    block 2  █████████████░░░        The front row, 15, has passed block 1 and did not exit there,
    block 1  ████████████████        so the sequence is ready for block 2, with 13 and 14 riding along.

Blocks and positions count from 0 in code. Knows nothing of devices, models or other sequences.
"""

from collections.abc import Sequence as Tokens

from nvium_core.engine.params import SamplingParams


class Sequence:
    """Row t of block k is done iff t < filled[k]; num_tokens ≥ filled[0] ≥ filled[1] ≥ … always."""

    def __init__(
        self, sequence_id: str, prompt: Tokens[int], params: SamplingParams, *, seed: int, num_blocks: int, arrival: int
    ) -> None:
        self.id = sequence_id
        self.params = params
        self.seed = seed
        self.arrival = arrival
        self.token_ids = list(prompt)
        self.num_prompt_tokens = len(prompt)
        self.filled = [0] * num_blocks
        self.pages: list[int] = []
        self.seat: int | None = None
        self.log_reached = 0.0
        """log Π (1 − w_j) over the junctions at which the front row has continued."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_generated(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    def pending_rows(self, block: int) -> range:
        """Positions that have reached this block and not passed it."""
        arrived = self.filled[block - 1] if block else self.num_tokens
        return range(self.filled[block], arrived)

    @property
    def front_block(self) -> int:
        """The block the front row waits for."""
        return next(block for block, filled in enumerate(self.filled) if filled < self.num_tokens)

    @property
    def deepest_pending_block(self) -> int:
        """The last block that any row waits for."""
        return max(block for block in range(len(self.filled)) if self.pending_rows(block))

    @property
    def num_deferred_rows(self) -> int:
        """Rows that have not passed every block though a front at or after them has spoken."""
        return self.num_tokens - 1 - min(self.filled[-1], self.num_tokens - 1) if self.num_generated else 0

    def advance(self, block: int, rows: range) -> None:
        """Record that these rows, the first of the block's pending ones, have passed it."""
        assert rows.start == self.filled[block] and rows.stop <= self.pending_rows(block).stop
        self.filled[block] = rows.stop

    def append(self, token_id: int) -> None:
        """Take the token the front row spoke; its own row becomes the front."""
        self.token_ids.append(token_id)
        self.log_reached = 0.0

    def reset(self) -> None:
        """Forget all that was computed, but no token: the staircase of a sequence that lost its cache."""
        self.filled = [0] * len(self.filled)
        self.log_reached = 0.0
