"""Detokenizes one choice incrementally, with its echoed prompt and its stop strings."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tokenizers import Tokenizer

from nvium_core import FinishReason, Score, TokenEvent
from nvium_core.text.detokenizer import REPLACEMENT, AnswerText, Detokenizer, StopStrings


@dataclass(frozen=True)
class Prompt:
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


class ChoiceText:
    """The text of choice number `index`."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str],
        index: int,
        prompt: Prompt,
        *,
        include_stop: bool,
        echo: bool,
        min_tokens: int = 0,
    ) -> None:
        self.index = index
        self.prompt = prompt
        self._tokenizer = tokenizer
        echoes_tokens = echo and prompt.text is None
        is_context = not (echoes_tokens or (prompt.text or "").endswith(REPLACEMENT))
        context = prompt.token_ids if is_context else []
        detokenizer = Detokenizer(tokenizer, context)
        self._echo: Iterable[str] = [prompt.text or ""] if echo else []
        """The prompt's text until it is taken. Its tokens are detokenized only then, choice by choice."""
        if echoes_tokens:
            self._echo = map(detokenizer.push, prompt.token_ids)
        self._answer = AnswerText(detokenizer, StopStrings(stops, include_stop), min_tokens)

    def prompt_offsets(self) -> list[int]:
        detokenizer, num_characters, offsets = Detokenizer(self._tokenizer), 0, []
        for token_id in self.prompt.token_ids:
            offsets.append(num_characters)
            num_characters += len(detokenizer.push(token_id))
        return offsets

    def add(self, events: Sequence[TokenEvent]) -> Delta:
        """Return a delta with these tokens and their text, up to the token that ends the choice."""
        delta, answer = Delta(self.index, self._take_echo()), self._answer
        for event in events:
            delta.tokens.append(event)
            delta.text_offsets.append(answer.num_characters)
            delta.text += answer.push(event.token_id, is_stop=event.is_stop, finish_reason=event.finish_reason)
            if answer.finish_reason:
                delta.finish_reason = answer.finish_reason
                break
        return delta

    def end(self, reason: FinishReason) -> Delta:
        """End the choice without a further token. Return a delta with the text that was held back."""
        return Delta(self.index, self._take_echo() + self._answer.end(), finish_reason=reason)

    def _take_echo(self) -> str:
        echo, self._echo = "".join(self._echo), []
        self._answer.num_characters += len(echo)
        return echo
