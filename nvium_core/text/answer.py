"""The text of one answer: detokenized, and cut at a stop string or before a repeated tool call."""

from dataclasses import dataclass, field

from nvium_core.text.detokenizer import Detokenizer, StopStrings
from nvium_core.text.repeated_calls import RepeatedCalls


@dataclass
class AnswerText:
    """Turns the tokens of one answer into text, and buffers text that may have to be cut.

    repeated_calls: if given, a repeated tool call ends the answer.
    """

    detokenizer: Detokenizer
    stops: StopStrings
    repeated_calls: RepeatedCalls | None = None
    num_characters: int = field(default=0, init=False)
    """Number of characters so far, including buffered and cut ones."""

    @property
    def has_stopped(self) -> bool:
        """Whether a stop string or a repeated call has ended the answer."""
        return self.stops.matched is not None or (self.repeated_calls is not None and self.repeated_calls.has_ended)

    def push(self, token_id: int, *, is_stop: bool, is_last: bool) -> str:
        """Add a token and return the text that can be emitted.

        A stop token has text only if stop strings are included. After the last token, all buffered text is emitted.
        """
        text = "" if is_stop and not self.stops.include else self.detokenizer.push(token_id)
        if is_last:
            text += self.detokenizer.flush()
        self.num_characters += len(text)
        certain = self._uncut(self.stops.push(text))
        return certain + self._flush() if is_last or self.has_stopped else certain

    def end(self) -> str:
        """Return the buffered text of an answer that ends without a further token."""
        return self._uncut(self.stops.push(self.detokenizer.flush())) + self._flush()

    def _uncut(self, text: str) -> str:
        return self.repeated_calls.push(text) if self.repeated_calls else text

    def _flush(self) -> str:
        rest = self._uncut(self.stops.flush())
        return rest + self.repeated_calls.flush() if self.repeated_calls else rest
