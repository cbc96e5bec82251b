"""Events of an engine (tokens, prompt scores, failures), and completions collected from them."""

import math
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from nvium_core.choices import FinishReason
from nvium_core.engine.errors import EngineError


class Score(NamedTuple):
    """A token's log-probability under π_mix, before f is applied.

    `top`: the most probable tokens at the same position, best first, as (id, log π_mix). `exit_probabilities`: p_k of
    all exits at this position; empty if the token was scored at its exit.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    exit_probabilities: tuple[float, ...] = ()


class TokenEvent(NamedTuple):
    """An emitted token. `exit` counts from 1; `exit_probability` is p_k of that exit.

    `choice` is the index of the request's choice. `score` is set if the request asks for logprobs or probabilities; the
    event is then delayed until the score is known. `is_stop`: the token is end-of-text or another stop token. It is
    False if the output ends only because its constraint is complete.
    """

    request_id: str
    token_id: int
    exit: int
    exit_probability: float
    finish_reason: FinishReason | None
    choice: int = 0
    score: Score | None = None
    is_stop: bool = False


@dataclass(frozen=True, slots=True)
class PromptEvent:
    """Scores of the next prompt tokens, in order. The first prompt token has no score.

    If `max_tokens` is 0, the last of these events ends the request.
    """

    request_id: str
    scores: tuple[Score, ...]
    finish_reason: FinishReason | None
    choice: int = 0


@dataclass(frozen=True, slots=True)
class FailureEvent:
    """A sequence failed and has ended. Other sequences are not affected."""

    request_id: str
    error: EngineError
    choice: int = 0


Event = TokenEvent | PromptEvent | FailureEvent


class StepReport(NamedTuple):
    """Work of one block (1-based) in a Step: number of passes, total rows, seconds."""

    block: int
    num_passes: int
    num_rows: int
    seconds: float


@dataclass
class Completion:
    """Output of one choice. `exits` count from 1. `scores` and `prompt_scores` are empty unless requested."""

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


def mean_logprob(scores: Items[Score]) -> float:
    """Return the mean log π_mix per token. Without tokens, return -inf, so that an empty choice is ranked last."""
    return sum(score.logprob for score in scores) / len(scores) if scores else -math.inf


Ranked = TypeVar("Ranked")


def best(choices: Items[Ranked], n: int, scores: Callable[[Ranked], Items[Score]]) -> list[Ranked]:
    """Return the `n` best choices, best first. If there are no more than `n`, return them in their original order."""
    if len(choices) <= n:
        return list(choices)
    return sorted(choices, key=lambda choice: mean_logprob(scores(choice)), reverse=True)[:n]
