"""A sequence: its tokens, and the staircase of how far each block has got with them.

    block 4  ████████░░░░░░░░        filled = [16, 13, 13, 8], 16 tokens
    block 3  █████████████░░░        rows 8…12 wait for block 4, rows 13…15 for block 2.
    block 2  █████████████░░░        The front row, 15, has passed block 1 and did not exit there,
    block 1  ████████████████        so the sequence is ready for block 2, with 13 and 14 riding along.

Row t, once it has passed every block, gives log π_mix of token t + 1: it can be *scored*. A sequence with
log-probabilities *owes* scores until then.

Blocks and positions count from 0 in code. Knows nothing of devices, models or pages, and of other sequences only that
the choices of one request share a prompt.
"""

from collections.abc import Sequence as Items
from typing import Literal

from nvium_core.engine.constraint import ConstraintState
from nvium_core.engine.params import Kind, SamplingParams
from nvium_core.engine.schedule.logit_changes import LogitChanges
from nvium_core.engine.schedule.ngrams import Find, Ngrams, Shares

FinishReason = Literal["stop", "length"]

SCORE_WINDOW = 32
"""Rows of a sequence that may await scoring: bounds how late a log-probability comes."""


class Sequence:
    """Row t of block k is done iff t < filled[k]; num_rows ≥ filled[0] ≥ filled[1] ≥ … always."""

    def __init__(
        self,
        request_id: str,
        prompt: Items[int],
        params: SamplingParams,
        *,
        seed: int,
        num_blocks: int,
        arrival: int,
        choice: int = 0,
        stop_token_ids: frozenset[int] = frozenset(),
        tenant: str = "",
        priority: int = 0,
        cache_salt: str = "",
    ) -> None:
        self.id = request_id
        self.tenant = tenant
        """Waiting sequences are admitted tenant by tenant in turn."""
        self.priority = priority
        """Among a tenant's own the lowest is admitted first."""
        self.cache_salt = cache_salt
        """Pages are shared with sequences of the same salt only."""
        self.choice = choice
        self.params = params
        self.draw = params.draw
        self.is_original = self.draw.kind is Kind.RACE
        self.needs_scores = params.needs_scores
        self.seed = seed
        self.arrival = arrival
        self.stop_token_ids = stop_token_ids
        self.constraint = None if params.constraint is None else ConstraintState(params.constraint)
        self.awaits_constraint = self.constraint is not None
        """Its constraint has not yet computed the next mask."""
        self.changes = LogitChanges(params, prompt, stop_token_ids) if self.draw.is_adjusted else None
        self.token_ids = list(prompt)
        self.num_prompt_tokens = len(prompt)
        self.max_length = len(prompt) + params.max_tokens
        self.num_drafts = 0
        """Number of drafts at the end of `token_ids`, not verified by the last exit and not emitted."""
        self._ngrams: Ngrams | None = None
        self.siblings: list[Sequence] = [self]
        """The request's living choices, this one among them; the first leads and prefills for all."""
        self.finish_reason: FinishReason | None = None
        """Set when the last token has been emitted; a sequence that owes no scores then ends."""
        self.num_scored = 0 if params.prompt_logprobs and choice == params.choice else len(prompt) - 1
        """Rows before this one need no scores, or have been given them. A prompt is scored by its first choice."""
        self.filled = [0] * num_blocks
        self.pages: list[int] = []
        self.page_digests: list[bytes] = []
        """Digest of each full page's tokens, filled in by the pool on demand."""
        self.seat: int | None = None
        self.num_cached_prompt_tokens: int | None = None
        """Rows of the prompt found in the cache when it was first admitted; None until then."""
        self.num_prefill_rows = 0
        """Rows at its last admission, cached ones included; later rows are of tokens emitted since."""
        self.last_step = 0
        """When it last was run, in Steps of its scheduler."""
        self.log_reached = 0.0
        """log Π (1 − w_j) over the junctions at which the front row has continued."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_generated(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_rows(self) -> int:
        """Rows to compute: all but the last token's once the sequence has finished."""
        return len(self.token_ids) - (self.finish_reason is not None)

    @property
    def num_cacheable_rows(self) -> int:
        """Rows that may come from the prefix cache: neither the front nor rows to be scored."""
        return min(self.num_scored, self.num_rows - 1) if self.needs_scores else self.num_rows - 1

    def pending_rows(self, block: int) -> range:
        """Rows that have reached this block and not passed it."""
        return range(self.filled[block], self._num_rows_before(block))

    def num_pending_rows(self, block: int) -> int:
        return self._num_rows_before(block) - self.filled[block]

    def _num_rows_before(self, block: int) -> int:
        """Rows that have reached this block."""
        if block:
            return self.filled[block - 1]
        num_rows = len(self.token_ids) - (self.finish_reason is not None)
        return min(num_rows, self._score_limit) if self.needs_scores else num_rows

    @property
    def _score_limit(self) -> int:
        """Rows that may have passed the first block: the prompt's, whose scores are returned together, and
        `SCORE_WINDOW` beyond those that are scored."""
        return max(self.num_scored + SCORE_WINDOW, self.num_prompt_tokens - 1)

    @property
    def ready_block(self) -> int:
        """The block to run next, deepest first: the one the front waits for. Where scores are due, the last one that
        any row waits for."""
        if self.must_catch_up:
            return self.deepest_pending_block
        num_tokens = len(self.token_ids)
        for block, filled in enumerate(self.filled):
            if filled < num_tokens:
                return block
        raise AssertionError("the front has passed every block and emitted nothing")

    @property
    def deepest_pending_block(self) -> int:
        filled = self.filled
        for block in range(len(filled) - 1, 0, -1):
            if filled[block] < filled[block - 1]:
                return block
        assert self.num_pending_rows(0)
        return 0

    @property
    def must_catch_up(self) -> bool:
        """Scores are due: it has finished, or SCORE_WINDOW rows wait to be scored."""
        if self.finish_reason is not None:
            return True
        return self.needs_scores and self.filled[0] == self._score_limit

    @property
    def owes_scores(self) -> bool:
        return self.needs_scores and self.num_scored < self.num_tokens - 1

    @property
    def first_scored(self) -> int:
        """Rows from here on are scored once they have passed the last block; none if that is beyond the last."""
        return self.num_scored if self.needs_scores else self.max_length

    @property
    def num_deferred_rows(self) -> int:
        """Rows that have not passed every block though a front at or after them has emitted."""
        return self.num_tokens - 1 - min(self.filled[-1], self.num_tokens - 1) if self.num_generated else 0

    def append(self, token_id: int) -> None:
        """Append a token that is emitted; its row becomes the front."""
        self.token_ids.append(token_id)
        self.log_reached = 0.0
        if self.changes is not None:
            self.changes.append(token_id)
        if self.constraint is not None:
            self.constraint.advance(token_id)
            self.awaits_constraint = True

    @property
    def num_verified(self) -> int:
        """Tokens that are no drafts."""
        return len(self.token_ids) - self.num_drafts

    @property
    def may_run_ahead(self) -> bool:
        """Whether a call may emit several tokens: nothing that only the host knows depends on the first."""
        is_free = self.constraint is None and (self.changes is None or self.changes.may_run_ahead)
        return is_free and not (self.needs_scores or self.num_drafts) and self.finish_reason is None

    @property
    def may_draft(self) -> bool:
        """Whether another draft can help. Requests with scores or adjusted logits are not drafted."""
        if not self.is_original or self.draw.is_adjusted or self.needs_scores or self.finish_reason is not None:
            return False
        return self.num_tokens + 1 < self.max_length

    @property
    def first_verified(self) -> int:
        """The first row whose next token the last exit is to draw; none if that is the number of rows."""
        return self.num_verified - 1 if self.is_original and self.finish_reason is None else self.num_tokens

    def append_drafts(self, token_ids: Items[int]) -> None:
        """Append drafts up to the first that would end the sequence."""
        for token_id in token_ids:
            if not self.may_draft or token_id in self.stop_token_ids:
                return
            self.token_ids.append(token_id)
            self.num_drafts += 1

    def look_up(self, others: Shares) -> Find | None:
        """Where the last verified tokens stood before; `others` are of sequences that draw alike."""
        self._ngrams = self._ngrams or Ngrams(others)
        return self._ngrams.find(self.token_ids, self.num_verified)

    def verify(self, token_id: int) -> bool:
        """Take the last exit's next token; whether it confirms a draft. Another one replaces all drafts."""
        if self.num_drafts and self.token_ids[self.num_verified] == token_id:
            self.num_drafts -= 1
            return True
        self.take_back()
        self.append(token_id)
        return False

    def take_back(self) -> None:
        """Forget all drafts, and the rows behind the last verified token's, which is the front again."""
        if self.num_drafts:
            del self.token_ids[self.num_verified :]
            self.num_drafts = 0
            num_rows = self.num_rows
            self.filled = [min(filled, num_rows) for filled in self.filled]

    def start_at(self, num_rows: int) -> None:
        """Start with these rows done in every block: their pages were found in the cache."""
        self.filled = [num_rows] * len(self.filled)

    def note_admission(self) -> None:
        """Called on admission, after shared pages were assigned."""
        self.num_prefill_rows = self.num_tokens
        if self.num_cached_prompt_tokens is None:
            self.num_cached_prompt_tokens = self.filled[0]

    def reset(self) -> None:
        """Drop all computed rows but keep the tokens: the sequence lost its cache."""
        self.take_back()
        self.start_at(0)
        self.log_reached = 0.0
