"""Penalties, `logit_bias` and `min_tokens` of a sequence: g (see `SamplingParams`) without the constraint. Torch-free.

Each affected token has an entry. Generated tokens update the entries.
"""

import math
from array import array
from collections.abc import Iterable
from collections.abc import Sequence as Items

from nvium_core.engine.sampling_params import SamplingParams

FIELDS = ("token", "repetition", "occurrence", "bias")
"""Numbers of an entry. They change the logit x of the token to
(x > 0 ? x / repetition : x · repetition) − occurrence + bias."""

NUM_FIELDS = len(FIELDS)
NEUTRAL = (0.0, 1.0, 0.0, 0.0)  # an entry that changes nothing


class LogitChanges:
    """Changes to a sequence's logits. `stop_token_ids` are masked until `min_tokens` tokens are generated."""

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
