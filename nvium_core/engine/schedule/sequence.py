"""A sequence: its tokens, and its staircase, the number of rows that each block has computed (see ARCHITECTURE.md).

A row t that has passed every block can be *scored*: it determines log π_mix of token t + 1. If a request asks for
log-probabilities, its sequences *owe* scores until all rows are scored.

Blocks and positions count from 0 in code. A sequence knows nothing of devices, models or the page pool.
"""

import math
from array import array
from collections.abc import Iterable
from collections.abc import Sequence as Items
from functools import cached_property

import numpy as np

from nvium_core.choices import FinishReason
from nvium_core.engine.constraint import ConstraintState
from nvium_core.engine.sampling_params import DRAW, Draw, ExitRule, SamplingParams, Uniforms

SCORE_WINDOW = 32
"""Maximum rows of a sequence that wait for scores, which bounds the delay of a log-probability."""

FIELDS = ("token", "repetition", "occurrence", "bias")
"""Numbers of an entry. They change the logit x of the token to
(x > 0 ? x / repetition : x · repetition) − occurrence + bias."""

NUM_FIELDS = len(FIELDS)
NEUTRAL = (0.0, 1.0, 0.0, 0.0)  # an entry that changes nothing


class LogitChanges:
    """Penalties, `logit_bias` and `min_tokens` of a sequence: g (see `SamplingParams`) without the constraint.

    Each affected token has an entry. Generated tokens update the entries. `stop_token_ids` are masked until
    `min_tokens` tokens are generated.
    """

    def __init__(self, params: SamplingParams, prompt: Items[int], stop_token_ids: Iterable[int]) -> None:
        self.entries = array("d")
        """`NUM_FIELDS` numbers per entry."""
        self._params = params
        self._index: dict[int, int] = {}
        self._counts: dict[int, int] = {}
        self._early = frozenset(stop_token_ids) if params.min_tokens else frozenset[int]()
        self._num_generated = 0
        if params.repetition_penalty != 1:
            for token in prompt:
                self.entries[self._entry(token) + 1] = params.repetition_penalty
        for token in (*params.logit_bias, *self._early):
            self._entry(token)

    def __len__(self) -> int:
        return len(self.entries) // NUM_FIELDS

    @property
    def allows_async(self) -> bool:
        """Whether a generated token changes only the entry of that token."""
        return not self._early

    def append(self, token_id: int) -> None:
        params = self._params
        self._num_generated += 1
        if params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1:
            self._counts[token_id] = count = self._counts.get(token_id, 0) + 1
            entry = self._entry(token_id)
            self.entries[entry + 1] = params.repetition_penalty
            self.entries[entry + 2] = params.presence_penalty + params.frequency_penalty * count
        if self._early and self._num_generated == params.min_tokens:
            for token in self._early:
                self.entries[self._entry(token) + 3] = params.logit_bias.get(token, 0.0)
            self._early = frozenset()

    def _entry(self, token_id: int) -> int:
        if token_id not in self._index:
            self._index[token_id] = len(self.entries)
            bias = -math.inf if token_id in self._early else self._params.logit_bias.get(token_id, 0.0)
            self.entries.extend((token_id, 1.0, 0.0, bias))
        return self._index[token_id]


class Sequence:
    """One choice of a request. Block k has computed the rows t < filled[k], and num_rows ≥ filled[0] ≥ filled[1] ≥ …"""

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
        cache_salt: str = "",
        draw: Draw | None = None,
    ) -> None:
        self.request_id = request_id
        self.tenant = tenant
        self.cache_salt = cache_salt
        """Only sequences with the same salt share pages."""
        self.choice = choice
        self.params = params
        draw = draw or params.draw()
        is_certain = draw.rule == ExitRule.ARGMAX and num_blocks == 1
        self.draw = draw._replace(rule=ExitRule.ORIGINAL, temperature=0.0) if is_certain else draw
        """How to sample. If the model has a single exit, the argmax needs no certificate."""
        self.draw_bytes = np.array([self.draw], DRAW).tobytes()
        self.is_original = draw.rule == ExitRule.ORIGINAL
        self.needs_scores = params.needs_scores
        self.is_scored_at_exit = self.needs_scores and draw.rule == ExitRule.THRESHOLD and not params.probabilities
        """Whether a generated token's score is known when it is emitted, so that its row need not pass all blocks."""
        self.seed = seed
        self.arrival = arrival
        self.stop_token_ids = stop_token_ids
        self.constraint = None if params.constraint is None else ConstraintState(params.constraint)
        self.awaits_constraint = self.constraint is not None
        """Whether the constraint has not yet computed the next mask."""
        self.changes = LogitChanges(params, prompt, stop_token_ids) if params.is_adjusted else None
        self.token_ids = list(prompt)
        self.num_prompt_tokens = len(prompt)
        self.max_length = len(prompt) + params.max_tokens
        self.num_drafts = 0
        """Number of draft tokens at the end of `token_ids`: not yet verified by the last exit, and not emitted."""
        self.siblings: list[Sequence] = [self]
        """Unfinished choices of the request, including this sequence. The first choice prefills the prompt for all."""
        self.finish_reason: FinishReason | None = None if params.max_tokens else "length"
        """Set when the last token has been emitted. The sequence then ends, unless it owes scores."""
        self.num_scored = 0 if params.prompt_logprobs and choice == params.choice else len(prompt) - 1
        """All rows before this row have scores or need none. Only the first choice scores the prompt."""
        self.filled = [0] * num_blocks
        self.pages: list[int] = []
        self.page_digests: list[bytes] = []
        """Digests of full pages, computed by the pool on demand."""
        self.seat: int | None = None
        self.num_cached_prompt_tokens: int | None = None
        """Prompt rows found in the cache at the first admission; None before."""
        self.last_step = 0
        """Number of the last Step that ran this sequence."""
        self.log_reached = 0.0
        """log Π (1 − w_j) over the exits that the front row has passed."""

    @cached_property
    def uniforms(self) -> Uniforms:
        return Uniforms(self.seed, self.choice, len(self.filled))

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_generated(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_rows(self) -> int:
        """Number of rows to compute: one per token, except the last token of a finished sequence."""
        return len(self.token_ids) - (self.finish_reason is not None)

    @property
    def num_cacheable_rows(self) -> int:
        """Number of rows that may come from the prefix cache: they are before the front and need no scores."""
        return min(self.num_scored, self.num_rows - 1) if self.needs_scores else self.num_rows - 1

    def pending_rows(self, block: int) -> range:
        """Rows that have passed the previous block but not this block."""
        if block:
            return range(self.filled[block], self.filled[block - 1])
        return range(self.filled[0], min(self.num_rows, self._score_limit) if self.needs_scores else self.num_rows)

    @property
    def _score_limit(self) -> int:
        """Maximum rows that the first block may compute: the prompt, or `SCORE_WINDOW` rows beyond the scored rows.

        If tokens are scored at their exits, the front waits until the rows before it have been scored.
        """
        if self.is_scored_at_exit:
            last = self.num_prompt_tokens - 1
            return last if self.num_scored < last else self.max_length
        return max(self.num_scored + SCORE_WINDOW, self.num_prompt_tokens - 1)

    @property
    def ready_block(self) -> int:
        """The block that the front waits for. If scores are due, the deepest block that any row waits for."""
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
        assert self.pending_rows(0)
        return 0

    @property
    def must_catch_up(self) -> bool:
        """Whether scores are due: the sequence has finished, or `SCORE_WINDOW` rows wait for scores."""
        if self.finish_reason is not None:
            return True
        return self.needs_scores and self.filled[0] == self._score_limit

    @property
    def owes_scores(self) -> bool:
        return self.needs_scores and self.num_scored < self.num_tokens - 1

    @property
    def first_scored(self) -> int:
        """First row to score after the last block; `max_length` if no row is to be scored."""
        return self.num_scored if self.needs_scores else self.max_length

    @property
    def num_deferred_rows(self) -> int:
        """Number of rows before the front that have not passed every block; 0 until a token has been emitted."""
        return self.num_tokens - 1 - min(self.filled[-1], self.num_tokens - 1) if self.num_generated else 0

    def append(self, token_id: int) -> None:
        """Append an emitted token, whose row becomes the front."""
        self.token_ids.append(token_id)
        self.log_reached = 0.0
        if self.changes is not None:
            self.changes.append(token_id)
        if self.constraint is not None:
            self.constraint.advance(token_id)
            self.awaits_constraint = True

    @property
    def num_verified(self) -> int:
        return len(self.token_ids) - self.num_drafts

    @property
    def allows_async(self) -> bool:
        """Whether an emitted token's row may run before the host has read that token."""
        is_free = self.constraint is None and (self.changes is None or self.changes.allows_async)
        return is_free and not (self.needs_scores or self.num_drafts) and self.finish_reason is None

    @property
    def may_draft(self) -> bool:
        """Whether another draft token may be appended. Requests with scores or adjusted logits get no drafts."""
        if not self.is_original or self.changes is not None or self.needs_scores or self.finish_reason is not None:
            return False
        return self.num_tokens + 1 < self.max_length

    @property
    def first_verified(self) -> int:
        """First row whose next token the last exit must decide, if the rule is `ORIGINAL`. Otherwise `num_tokens`."""
        is_verified = self.draw.rule == ExitRule.ORIGINAL and self.finish_reason is None
        return self.num_verified - 1 if is_verified else self.num_tokens

    def append_drafts(self, token_ids: Items[int]) -> None:
        """Append draft tokens up to the first that would end the sequence."""
        for token_id in token_ids:
            if not self.may_draft or token_id in self.stop_token_ids:
                return
            self.token_ids.append(token_id)
            self.num_drafts += 1

    def verify(self, token_id: int) -> bool:
        """Append a token sampled by the last exit. If the next draft differs, drop all drafts and return False."""
        if self.num_drafts and self.token_ids[self.num_verified] == token_id:
            self.num_drafts -= 1
            return True
        self.drop_drafts()
        self.append(token_id)
        return False

    def drop_drafts(self) -> None:
        """Drop all drafts and their rows. The last verified token's row becomes the front again."""
        if self.num_drafts:
            del self.token_ids[self.num_verified :]
            self.num_drafts = 0
            num_rows = self.num_rows
            self.filled = [min(filled, num_rows) for filled in self.filled]

    def start_at(self, num_rows: int) -> None:
        """Mark the first `num_rows` rows as computed by every block: their pages were found in the cache."""
        self.filled = [num_rows] * len(self.filled)

    def reset(self) -> None:
        self.drop_drafts()
        self.start_at(0)
        self.log_reached = 0.0
