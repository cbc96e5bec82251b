"""The text of one choice, token by token: the echoed prompt before it, and the stop string that ends it."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from tokenizers import Tokenizer

from nvium_core import TokenEvent
from nvium_core.text.detokenizer import REPLACEMENT, Detokenizer, FinishReason, StopStrings
from nvium_core.text.repeated_calls import RepeatedCalls
from nvium_core.text.tool_calls import CallFormat
from server.generation.delta import Delta


@dataclass(frozen=True)
class Prompt:
    """A prompt's tokens, and its text if it came as text."""

    token_ids: list[int]
    text: str | None = None

    def truncated(self, num_tokens: int) -> "Prompt":
        return self if len(self.token_ids) <= num_tokens else Prompt(self.token_ids[-num_tokens:])


@dataclass(frozen=True)
class CallText:
    """How tool calls appear in an answer's text.

    `continued` is the part of the answer that the prompt already has; `has_begun`: the grammar continues after it.
    `shown` maps special tokens to their text. `ends_at_repeated`: the answer ends before it repeats a call of this
    format.
    """

    continued: str = ""
    has_begun: bool = False
    shown: Mapping[int, str] = field(default_factory=dict)
    ends_at_repeated: CallFormat | None = None


NO_CALLS = CallText()


class ChoiceText:
    """`index` is the choice's number in its request. `end_token_ids` end the choice but are not reported as
    `stop_reason`."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str],
        index: int,
        prompt: Prompt,
        *,
        include_stop: bool,
        echo: bool,
        skips_special: bool = True,
        end_token_ids: Collection[int] = (),
        calls: CallText = NO_CALLS,
    ) -> None:
        self.index = index
        self.prompt = prompt
        self.calls = calls
        self._end_token_ids = end_token_ids
        self._tokenizer = tokenizer
        self._includes_stop = include_stop
        self._stops = StopStrings(stops, include=include_stop)
        self._repeated = RepeatedCalls(calls.ends_at_repeated) if calls.ends_at_repeated else None
        if self._repeated and calls.has_begun:
            self._repeated.push(calls.continued)
        echoes_tokens = echo and prompt.text is None
        is_context = not (echoes_tokens or (prompt.text or "").endswith(REPLACEMENT))
        context = prompt.token_ids if is_context else []
        self._detokenizer = Detokenizer(tokenizer, context, skips_special=skips_special, shown=calls.shown)
        self._echo = (prompt.text or "") if echo else ""
        if echoes_tokens:
            self._echo = "".join(map(self._detokenizer.push, prompt.token_ids))
        self._num_characters = len(self._echo)

    def prompt_offsets(self) -> list[int]:
        """Character offset of each prompt token."""
        detokenizer, num_characters, offsets = Detokenizer(self._tokenizer), 0, []
        for token_id in self.prompt.token_ids:
            offsets.append(num_characters)
            num_characters += len(detokenizer.push(token_id))
        return offsets

    def take(self, events: Sequence[TokenEvent]) -> Delta:
        """The text of these tokens, up to the one that ends the choice."""
        delta = Delta(self.index, self._echo)
        self._echo = ""
        for event in events:
            delta.tokens.append(event)
            delta.text_offsets.append(self._num_characters)
            delta.text += self._push(event)
            if self._has_stopped or event.finish_reason:
                delta.text += self._flush()
                delta.finish_reason = "stop" if self._has_stopped else event.finish_reason
                delta.stop_reason = self._stop_reason(event)
                break
        return delta

    def end(self, reason: FinishReason) -> Delta:
        """The text that was held back, for an end without a token."""
        text = self._echo + self._certain(self._detokenizer.flush()) + self._flush()
        return Delta(self.index, text, finish_reason=reason)

    @property
    def _has_stopped(self) -> bool:
        return self._stops.matched is not None or (self._repeated is not None and self._repeated.has_ended)

    def _certain(self, text: str) -> str:
        certain = self._stops.push(text)
        return self._repeated.push(certain) if self._repeated else certain

    def _flush(self) -> str:
        """The text that was held back."""
        rest = self._stops.flush()
        return self._repeated.push(rest) + self._repeated.flush() if self._repeated else rest

    def _stop_reason(self, event: TokenEvent) -> int | str | None:
        if self._stops.matched is not None:
            return self._stops.matched
        return event.token_id if event.is_stop and event.token_id not in self._end_token_ids else None

    def _push(self, event: TokenEvent) -> str:
        text = "" if event.is_stop and not self._includes_stop else self._detokenizer.push(event.token_id)
        if event.finish_reason:
            text += self._detokenizer.flush()
        self._num_characters += len(text)
        return self._certain(text)
