"""g: what a request does to logits before temperature and truncation — penalties, `logit_bias`, `min_tokens`, and last
its constraint's mask.

Each change is a flat list of (row, token id, value), made on the host from the tokens a sequence has, so that nothing
has to be kept in step with them; a mask is a bit per token. What no sequence asks for costs nothing on the device.
Shapes: R sequences, M masked ones, C changed logits, V vocabulary, B bytes of 8 tokens; X any leading dimensions.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items

import numpy as np
import torch
from torch import Tensor

from nvium_core.engine.schedule.sequence import Sequence

TokenValues = Mapping[int, float]
"""A number for each token id concerned."""


def adjust(logits_XRV: Tensor, sequences: Items[Sequence]) -> None:
    """Apply g in place; `logits_XRV[..., r, :]` are logits of the token that follows those of `sequences[r]`.

    Nothing but -inf may come of -inf, so a token that is impossible remains so.
    """
    for asked, change in CHANGES:
        rows, tokens, values = flattened([asked(sequence) for sequence in sequences])
        if rows:
            places = (..., _like(logits_XRV, rows, torch.long), _like(logits_XRV, tokens, torch.long))
            logits_XRV[places] = change(logits_XRV[places], _like(logits_XRV, values, logits_XRV.dtype))
    forbid(logits_XRV, sequences)


def forbid(logits_XRV: Tensor, sequences: Items[Sequence]) -> None:
    """-inf, in place, for every token that its sequence's constraint does not allow."""
    constraints = {row: s.constraint for row, s in enumerate(sequences) if s.constraint is not None}
    if constraints:
        masks = [constraint.allowed for constraint in constraints.values()]
        forbidden_MV = ~unpacked(masks, logits_XRV.shape[-1]).to(logits_XRV.device)
        for row, forbidden_V in zip(constraints, forbidden_MV, strict=True):
            logits_XRV[..., row, :].masked_fill_(forbidden_V, -math.inf)


def unpacked(masks: Items[bytes], vocab_size: int) -> Tensor:
    """Bits as booleans, [M, V], on the host; false where a mask has none."""
    num_bytes = (vocab_size + 7) // 8
    packed = b"".join(mask[:num_bytes].ljust(num_bytes, b"\0") for mask in masks)
    packed_MB = np.frombuffer(packed, dtype=np.uint8).reshape(len(masks), num_bytes)
    return torch.from_numpy(np.unpackbits(packed_MB, axis=1, count=vocab_size, bitorder="little")).bool()


def flattened(by_row: Items[TokenValues]) -> tuple[list[int], list[int], list[float]]:
    """Rows, token ids and values of all entries, each token at most once per row."""
    rows = [row for row, values in enumerate(by_row) for _ in values]
    tokens = [token for values in by_row for token in values]
    return rows, tokens, [value for values in by_row for value in values.values()]


def repetition_penalties(sequence: Sequence) -> TokenValues:
    """The factor of every token of prompt or answer."""
    penalty = sequence.params.repetition_penalty
    return {} if penalty == 1 else dict.fromkeys(sequence.token_ids, penalty)


def occurrence_penalties(sequence: Sequence) -> TokenValues:
    """What presence and frequency take off the tokens generated so far."""
    presence, frequency = sequence.params.presence_penalty, sequence.params.frequency_penalty
    if presence == frequency == 0:
        return {}
    counts = Counter(sequence.token_ids[sequence.num_prompt_tokens :])
    return {token: presence + frequency * count for token, count in counts.items()}


def biases(sequence: Sequence) -> TokenValues:
    return sequence.params.logit_bias


def too_early_ends(sequence: Sequence) -> TokenValues:
    """-inf for stop tokens until `min_tokens` are generated: the next token is the first that may be one."""
    is_early = sequence.num_generated < sequence.params.min_tokens
    return dict.fromkeys(sequence.stop_token_ids, -math.inf) if is_early else {}


def repel(logits_XC: Tensor, penalty_C: Tensor) -> Tensor:
    """Divide positive logits and multiply negative ones."""
    return torch.where(logits_XC > 0, logits_XC / penalty_C, logits_XC * penalty_C)


CHANGES: tuple[tuple[Callable[[Sequence], TokenValues], Callable[[Tensor, Tensor], Tensor]], ...] = (
    (repetition_penalties, repel),
    (occurrence_penalties, torch.sub),
    (biases, torch.add),
    (too_early_ends, torch.add),
)
"""What a sequence asks for and what it does to the logits, in the order of application."""


def _like(logits_XRV: Tensor, values: Items[float], dtype: torch.dtype) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=logits_XRV.device)
