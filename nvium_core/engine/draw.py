"""How a token is drawn: the exit rule, temperature and truncation. The C++ is device/native/draw.h."""

import math
from enum import IntEnum
from typing import NamedTuple

import numpy as np


class ExitRule(IntEnum):
    """When a front row stops, and what its token is sampled from.

    `EXITS`: the routers choose exit k, and the token is sampled from f(π_k). `ARGMAX`: the token is the argmax of
    Σ p_k g(π_k), emitted at the first exit after which no later exit can change it. `MIXTURE`: the token is sampled
    from f(π_mix) at the last exit. `ORIGINAL`: the token is sampled from f(π_N) by an exponential race, which can
    verify drafts. `THRESHOLD`: the row stops at the first exit k with 1 − Π_{j≤k} (1 − w_j) ≥ `threshold`, and the
    token is sampled from f(π_k). `CONFIDENCE` (CALM): it stops at the first exit where max π_k > `threshold`.
    `ORIGINAL`, `THRESHOLD` and `CONFIDENCE` take the argmax at temperature 0. Only `EXITS` and `MIXTURE` are exact
    samples of the mixture. Rules before `ORIGINAL` are scored by the mixture, the others by the exit that they choose.
    """

    EXITS, ARGMAX, MIXTURE, ORIGINAL, THRESHOLD, CONFIDENCE = range(6)


RULES = {rule.name.lower(): rule for rule in ExitRule if rule != ExitRule.ARGMAX}
"""Rules by `SamplingParams.sampling`. "confidence" is not public: research compares with it."""

THRESHOLD_RULES = frozenset({ExitRule.THRESHOLD, ExitRule.CONFIDENCE})
"""Rules that need a threshold."""

UNSCORED_RULES = frozenset({ExitRule.CONFIDENCE})
"""Rules without log-probabilities."""

HEAD_RULES = frozenset({ExitRule.ARGMAX, ExitRule.CONFIDENCE})
"""Rules that need the logits of every exit that a row passes."""


class Draw(NamedTuple):
    """How a token is sampled from logits. The fields and their order are those of `Draw` in native/draw.h.

    A log min-p of -inf, a top-k of 0 and a top-p of 1 disable the truncation. A threshold above 1 is never reached.
    """

    rule: int = ExitRule.EXITS
    threshold: float = math.inf
    temperature: float = 1.0
    log_min_p: float = -math.inf
    top_k: int = 0
    top_p: float = 1.0

    @property
    def is_ranked(self) -> bool:
        """Whether top-k or top-p truncates, which requires sorting."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1)


DRAW = np.dtype([(name, np.float64 if kind is float else np.int64) for name, kind in Draw.__annotations__.items()])
"""`Draw` as a record of 8-byte words."""
