"""Events of an engine: tokens, scores of the prompt, failures; and completions collected from them."""

import math
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeVar

from nvium_core.engine.schedule.sequence import FinishReason


class Score(NamedTuple):
    """log π_mix of a token, before f; and the most probable tokens in its place, (id, log π_mix) each, best first.

    `exit_probabilities` are p_k of all exits in that place.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    exit_probabilities: tuple[float, ...] = ()


class TokenEvent(NamedTuple):
    """A token was emitted. `exit` counts from 1; `exit_probability` is p_k of the exit taken.

    `choice` is its number among the request's alternatives. `score` comes with requests that ask for logprobs or
    probabilities; their tokens are held back until it is known. `is_stop`: it is end-of-text or another stop token; the
    last token of an answer that its constraint ends is neither.
    """

    sequence_id: str
    token_id: int
    exit: int
    exit_probability: float
    finish_reason: FinishReason | None
    choice: int = 0
    score: Score | None = None
    is_stop: bool = False


@dataclass(frozen=True, slots=True)
class PromptEvent:
    """Scores of further tokens of the prompt, in order, the second token's first. Ends a request for no tokens."""

    sequence_id: str
    scores: tuple[Score, ...]
    finish_reason: FinishReason | None
    choice: int = 0


FailureReason = Literal["failed", "stopped", "constraint_limit", "no_token_allowed"]


@dataclass(frozen=True, slots=True)
class FailureEvent:
    """A sequence ended because running it failed; others are not affected.

    `reason`: its own fault or the model's, the engine was stopped, or its constraint costs too much to follow or
    allows no token of the model.
    """

    sequence_id: str
    message: str
    choice: int = 0
    reason: FailureReason = "failed"


Event = TokenEvent | PromptEvent | FailureEvent


class StepReport(NamedTuple):
    """What one block (1-based) did in a Step: how often it ran, its rows in all, and the seconds that took."""

    block: int
    num_steps: int
    num_rows: int
    seconds: float


@dataclass
class Completion:
    """All that one choice emitted. `exits` count from 1; `scores` and `prompt_scores` are there if asked for."""

    token_ids: list[int] = field(default_factory=list)
    exits: list[int] = field(default_factory=list)
    exit_probabilities: list[float] = field(default_factory=list)
    scores: list[Score] = field(default_factory=list)
    prompt_scores: list[Score] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    def append(self, event: TokenEvent | PromptEvent) -> None:
        self.finish_reason = event.finish_reason
        if isinstance(event, PromptEvent):
            self.prompt_scores += event.scores
            return
        self.token_ids.append(event.token_id)
        self.exits.append(event.exit)
        self.exit_probabilities.append(event.exit_probability)
        if event.score is not None:
            self.scores.append(event.score)

    @property
    def mean_logprob(self) -> float:
        """Mean log π_mix per token, if scores were asked for."""
        return mean_logprob(self.scores)


def mean_logprob(scores: Items[Score]) -> float:
    """Mean log π_mix per token; -inf without tokens, so that an empty choice ranks last."""
    return sum(score.logprob for score in scores) / len(scores) if scores else -math.inf


Choice = TypeVar("Choice")


def best(choices: Items[Choice], n: int, rank: Callable[[Choice], float]) -> list[Choice]:
    """The n choices that rank highest, best first; as they are if there are no more than n."""
    return list(choices) if len(choices) <= n else sorted(choices, key=rank, reverse=True)[:n]
