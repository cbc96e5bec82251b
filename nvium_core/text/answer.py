"""The text of one answer: detokenized, and cut at a stop string."""

from dataclasses import dataclass, field

from nvium_core.text.detokenizer import Detokenizer, StopStrings


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

    @property
    def has_stopped(self) -> bool:
        return self.stops.matched is not None

    def push(self, token_id: int, *, is_stop: bool, is_last: bool) -> str:
        """Add a token and return the text that can be emitted.

        A stop token has text only if stop strings are included. After the last token, all buffered text is emitted.
        """
        text = "" if is_stop and not self.stops.include else self.detokenizer.push(token_id)
        if is_last:
            text += self.detokenizer.flush()
        self.num_characters += len(text)
        self.num_tokens += 1
        if self.num_tokens <= self.min_tokens:
            return text
        certain = self.stops.push(text)
        return certain + self.stops.flush() if is_last else certain

    def end(self) -> str:
        """Return the buffered text of an answer that ends without a further token."""
        return self.stops.push(self.detokenizer.flush()) + self.stops.flush()
