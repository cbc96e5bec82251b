"""The text of an answer while it is streamed: never part of a character or of a stop string.

The joined text does not depend on how it is split into chunks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from nvium_core.choices import FinishReason

REPLACEMENT = "\ufffd"
"""The decoder's replacement for bytes that are not UTF-8, such as part of a character."""

CONTEXT_TOKENS = 8
"""Number of last prompt tokens to decode first. The text of the first generated token may depend on them."""


class Detokenizer:
    """Emits text as soon as its characters are complete. Special tokens have no text."""

    def __init__(self, tokenizer: Tokenizer, preceding: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._held: list[int] = []
        for token_id in preceding[-CONTEXT_TOKENS:]:
            self.push(token_id)

    def push(self, token_id: int) -> str:
        self._held.append(token_id)
        text = self._stream.step(self._tokenizer, token_id)
        if text is None:
            return ""
        self._held.clear()
        return text

    def flush(self) -> str:
        """Return the remaining text. Drop an incomplete character at its end."""
        text: str = self._tokenizer.decode(self._held, skip_special_tokens=True)
        self._held.clear()
        return text.rstrip(REPLACEMENT)


@dataclass
class StopStrings:
    """Passes text through until the first stop string. Buffers only text that may begin a stop string."""

    stops: Sequence[str]
    include: bool = False
    matched: str | None = None
    _held: str = field(default="", init=False)

    def push(self, text: str) -> str:
        """Add text and return the text that can be emitted. After a match, return nothing."""
        if not self.stops:
            return text
        if self.matched is not None:
            return ""
        text = self._held + text
        if found := [(start + len(stop), start) for stop in self.stops if (start := text.find(stop)) >= 0]:
            end, start = min(found)
            self.matched, self._held = text[start:end], ""
            return text[: end if self.include else start]
        certain = certain_length(text, self.stops)
        self._held = text[certain:]
        return text[:certain]

    def flush(self) -> str:
        text, self._held = self._held, ""
        return text


def certain_length(text: str, marks: Sequence[str]) -> int:
    """Return the length of the prefix that cannot be part of a mark, if the text goes on."""
    longest = max(map(len, marks), default=0)
    candidates = range(max(0, len(text) - longest + 1), len(text))
    return next((i for i in candidates if any(mark.startswith(text[i:]) for mark in marks)), len(text))


@dataclass
class AnswerText:
    """Turns the tokens of one answer into text, and buffers text that may have to be cut.

    Stop strings in the text of the first `min_tokens` tokens are ignored.
    """

    detokenizer: Detokenizer
    stops: StopStrings
    min_tokens: int = 0
    num_tokens: int = field(default=0, init=False)
    num_characters: int = field(default=0, init=False)
    """Number of characters so far, including buffered and cut ones."""
    finish_reason: FinishReason | None = field(default=None, init=False)
    """Why the answer ended: as its last token says, or `stop` after a stop string."""

    def push(self, token_id: int, *, is_stop: bool, finish_reason: FinishReason | None) -> str:
        """Add a token and return the text that can be emitted.

        A stop token has text only if stop strings are included. After the last token, all buffered text is emitted.
        """
        text = "" if is_stop and not self.stops.include else self.detokenizer.push(token_id)
        self.finish_reason = finish_reason
        if finish_reason:
            text += self.detokenizer.flush()
        self.num_characters += len(text)
        self.num_tokens += 1
        if self.num_tokens <= self.min_tokens:
            return text
        certain = self.stops.push(text)
        if self.stops.matched is not None:
            self.finish_reason = "stop"
        return certain + self.stops.flush() if finish_reason else certain

    def end(self) -> str:
        """Return the buffered text of an answer that ends without a further token."""
        return self.stops.push(self.detokenizer.flush()) + self.stops.flush()
