"""From token ids to text as it comes: never half a character, never a piece of a stop string.

What is joined from any chunks equals what one chunk would give. Knows nothing of engines or HTTP.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

FinishReason = Literal["stop", "length"]

REPLACEMENT = "\ufffd"
"""What decoding puts for bytes that are no UTF-8, those of a cut character among them."""

CONTEXT_TOKENS = 8
"""Tokens before a completion that its first token may need: for its space, or for the half of a character."""


class Detokenizer:
    """Text of tokens, each piece as soon as its characters are whole. Special tokens have none, if skipped."""

    def __init__(self, tokenizer: Tokenizer, preceding: Sequence[int] = (), *, skips_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skips_special = skips_special
        self._stream = DecodeStream(skip_special_tokens=skips_special)
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
        """What is still held, less the cut character at its end."""
        text: str = self._tokenizer.decode(self._held, skip_special_tokens=self._skips_special)
        self._held.clear()
        return text.rstrip(REPLACEMENT)


@dataclass
class StopStrings:
    """Passes text on up to the stop string that is completed first (of several, the longest).

    Text that might yet become a stop string is held back, and nothing else.
    """

    stops: Sequence[str]
    include: bool = False
    matched: str | None = None
    """The stop string that was completed."""
    _held: str = field(default="", init=False)

    def push(self, text: str) -> str:
        """The text that is now certain; nothing after a match."""
        if not self.stops:
            return text
        if self.matched is not None:
            return ""
        text = self._held + text
        end, start = min((self._find(text, stop) for stop in self.stops), default=(len(text) + 1, 0))
        if end <= len(text):
            self.matched, self._held = text[start:end], ""
            return text[: end if self.include else start]
        certain = self._certain(text)
        self._held = text[certain:]
        return text[:certain]

    def flush(self) -> str:
        """What was held back for a stop string that did not come."""
        text, self._held = self._held, ""
        return text

    def _find(self, text: str, stop: str) -> tuple[int, int]:
        """(end, start) of the first occurrence; an end beyond the text if there is none."""
        start = text.find(stop)
        return (start + len(stop) if start >= 0 else len(text) + 1, start)

    def _certain(self, text: str) -> int:
        """The length of what cannot be the beginning of a stop string."""
        longest = max(map(len, self.stops), default=0)
        candidates = range(max(0, len(text) - longest + 1), len(text))
        return next((i for i in candidates if any(stop.startswith(text[i:]) for stop in self.stops)), len(text))
