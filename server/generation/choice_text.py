"""The text of one choice, token by token: what the prompt's echo puts before it, and the stop string that ends it."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tokenizers import Tokenizer

from nvium_core import TokenEvent
from nvium_core.text.detokenizer import REPLACEMENT, Detokenizer, FinishReason, StopStrings


@dataclass(frozen=True)
class Prompt:
    """A prompt's tokens, and its text if it came as text."""

    token_ids: list[int]
    text: str | None = None

    def truncated(self, num_tokens: int) -> "Prompt":
        """The last so many tokens."""
        return self if len(self.token_ids) <= num_tokens else Prompt(self.token_ids[-num_tokens:])


class Piece(NamedTuple):
    """Text that is certain, the tokens of that moment with the places of their characters, and whether it is the last.

    The text of a token may still be held back; `text_offsets` count from the beginning of the choice's text.
    """

    text: str
    tokens: list[TokenEvent]
    text_offsets: list[int]
    finish_reason: FinishReason | None
    stop_reason: int | str | None = None
    """The stop string or stop token that ended the choice; None for any other end."""


class ChoiceText:
    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Prompt,
        stops: Sequence[str],
        *,
        include_stop: bool,
        echo: bool,
        skips_special: bool = True,
        end_token_ids: Collection[int] = (),
    ) -> None:
        self._end_token_ids = end_token_ids
        self._tokenizer = tokenizer
        self._prompt = prompt
        self._includes_stop = include_stop
        self._stops = StopStrings(stops, include=include_stop)
        echoes_tokens = echo and prompt.text is None
        is_context = not (echoes_tokens or (prompt.text or "").endswith(REPLACEMENT))
        self._detokenizer = Detokenizer(tokenizer, prompt.token_ids if is_context else [], skips_special=skips_special)
        self._echo = (prompt.text or "") if echo else ""
        if echoes_tokens:
            self._echo = "".join(map(self._detokenizer.push, prompt.token_ids))
        self._num_characters = len(self._echo)

    def prompt_offsets(self) -> list[int]:
        """Where the characters of each of the prompt's tokens begin."""
        detokenizer, num_characters, offsets = Detokenizer(self._tokenizer), 0, []
        for token_id in self._prompt.token_ids:
            offsets.append(num_characters)
            num_characters += len(detokenizer.push(token_id))
        return offsets

    def take(self, events: Sequence[TokenEvent]) -> Piece:
        """What these tokens give, up to the one that ends the choice."""
        text, self._echo = self._echo, ""
        offsets: list[int] = []
        for event in events:
            offsets.append(self._num_characters)
            text += self._push(event)
            if self._stops.matched is not None or event.finish_reason:
                reason = "stop" if self._stops.matched is not None else event.finish_reason
                text += self._stops.flush()
                return Piece(text, [*events[: len(offsets)]], offsets, reason, self._stop_reason(event))
        return Piece(text, [*events], offsets, None)

    def end(self, reason: FinishReason) -> Piece:
        """What was held back, for an end that no token brings."""
        text = self._echo + self._stops.push(self._detokenizer.flush())
        return Piece(text + self._stops.flush(), [], [], reason)

    def _stop_reason(self, event: TokenEvent) -> int | str | None:
        if self._stops.matched is not None:
            return self._stops.matched
        return event.token_id if event.is_stop and event.token_id not in self._end_token_ids else None

    def _push(self, event: TokenEvent) -> str:
        text = "" if event.is_stop and not self._includes_stop else self._detokenizer.push(event.token_id)
        if event.finish_reason:
            text += self._detokenizer.flush()
        self._num_characters += len(text)
        return self._stops.push(text)
