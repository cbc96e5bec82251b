"""One choice of a request: its tokens, its text with an echoed prompt, and its prompt's scores."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tokenizers import Tokenizer

from nvium_core import Admitted, FinishReason, PromptEvent, Score, TokenEvent
from nvium_core.text.detokenizer import REPLACEMENT, AnswerText, Detokenizer, StopStrings
from server.telemetry.record import RequestRecord


class Prompt(NamedTuple):
    """A tokenized prompt, with its text if the client sent text."""

    token_ids: list[int]
    text: str | None = None


@dataclass(slots=True)
class Delta:
    """Output of one choice since its last delta.

    `text` may lag behind `tokens`: possible stop strings and incomplete characters are held back.
    """

    index: int
    """The choice's number in its request."""
    text: str = ""
    tokens: list[TokenEvent] = field(default_factory=list)
    text_offsets: list[int] = field(default_factory=list)
    """Where each token's characters start in the choice's text."""
    finish_reason: FinishReason | None = None
    prompt_scores: list[Score] = field(default_factory=list)
    """Scores of prompt tokens that arrived since the last delta."""

    def extend(self, later: "Delta") -> None:
        self.text += later.text
        self.tokens += later.tokens
        self.text_offsets += later.text_offsets
        self.prompt_scores += later.prompt_scores
        self.finish_reason = later.finish_reason


class Choice:
    """One sequence of the engine, and its text. `index` is the choice's number in its request.

    The first choice of a prompt is the `leader` of the prompt's other choices. If `is_scored`, the engine sends the
    prompt's scores to the leader only. The deltas of every choice start with these scores.
    """

    def __init__(
        self,
        index: int,
        prompt: Prompt,
        record: RequestRecord,
        tokenizer: Tokenizer,
        stops: StopStrings,
        leader: "Choice | None" = None,
        *,
        echo: bool,
        is_scored: bool,
        min_tokens: int = 0,
    ) -> None:
        self.index = index
        self.prompt = prompt
        self.num_unscored = len(prompt.token_ids) - 1 if is_scored and leader is None else 0
        """Number of prompt tokens whose scores have not arrived."""
        self.num_cached_tokens = 0
        self.prompt_scores: list[Score] = []
        self.record = record
        self.last_arrival: float | None = None
        """When the last token arrived; None before the first."""
        self._leader = leader
        self._has_begun = False
        self._submitted = time.monotonic()
        self._tokenizer = tokenizer
        echoes_tokens = echo and prompt.text is None
        is_context = not (echoes_tokens or (prompt.text or "").endswith(REPLACEMENT))
        detokenizer = Detokenizer(tokenizer, prompt.token_ids if is_context else [])
        self._echo: Iterable[str] = [prompt.text or ""] if echo else []
        """The prompt's text until it is taken. Its tokens are detokenized only then, choice by choice."""
        if echoes_tokens:
            self._echo = map(detokenizer.push, prompt.token_ids)
        self._answer = AnswerText(detokenizer, stops, min_tokens)

    @property
    def awaits_scores(self) -> bool:
        return self._leader is not None and self._leader.num_unscored > 0

    def prompt_offsets(self) -> list[int]:
        detokenizer, num_characters, offsets = Detokenizer(self._tokenizer), 0, []
        for token_id in self.prompt.token_ids:
            offsets.append(num_characters)
            num_characters += len(detokenizer.push(token_id))
        return offsets

    def add(self, events: Sequence[TokenEvent | PromptEvent], admission: Admitted) -> Delta:
        """Return a delta with these tokens and their text, up to the token that ends the choice."""
        self.note_admission(admission)
        tokens = [event for event in events if isinstance(event, TokenEvent)]
        if tokens:
            now = time.monotonic()
            self.record.tokens_arrived(len(tokens), now, self.last_arrival)
            self.last_arrival = now
        delta, answer = Delta(self.index, self._take_echo()), self._answer
        for event in tokens:
            delta.tokens.append(event)
            delta.text_offsets.append(answer.num_characters)
            delta.text += answer.push(event.token_id, is_stop=event.is_stop, finish_reason=event.finish_reason)
            if answer.finish_reason:
                delta.finish_reason = answer.finish_reason
                break
        if self._leader and self._leader.prompt_scores:
            delta.prompt_scores, self._leader = self._leader.prompt_scores, None
        self.record.served(delta.tokens)
        if len(tokens) < len(events):
            self._take_scores([event for event in events if isinstance(event, PromptEvent)], delta)
        return delta

    def end(self, reason: FinishReason) -> Delta:
        """End the choice without a further token. Return a delta with the text that was held back."""
        return Delta(self.index, self._take_echo() + self._answer.end(), finish_reason=reason)

    def note_admission(self, admission: Admitted) -> None:
        """At the first call, record that the choice has left the queue."""
        if not self._has_begun:
            self._has_begun = True
            self.num_cached_tokens = admission.num_cached_prompt_tokens
            num_cached = self.num_cached_tokens if self._leader is None else 0  # count shared rows once
            self.record.left_queue(admission.at - self._submitted, num_cached)

    def _take_echo(self) -> str:
        echo, self._echo = "".join(self._echo), []
        self._answer.num_characters += len(echo)
        return echo

    def _take_scores(self, of_prompt: Sequence[PromptEvent], delta: Delta) -> None:
        delta.prompt_scores = [score for event in of_prompt for score in event.scores]
        self.prompt_scores += delta.prompt_scores
        self.num_unscored -= len(delta.prompt_scores)
        if of_prompt[-1].finish_reason:
            delta.extend(self.end(of_prompt[-1].finish_reason))
