"""What a choice produced since the last delta; the form in which tokens reach the writers."""

from dataclasses import dataclass, field

from nvium_core import Score, TokenEvent
from nvium_core.text.detokenizer import FinishReason


@dataclass(slots=True)
class Delta:
    """Text that is certain, the tokens that arrived, and scores of further prompt tokens.

    The text of a token may still be held back; `text_offsets` count from the beginning of the choice's text.
    """

    index: int
    """The choice's number in its request."""
    text: str = ""
    tokens: list[TokenEvent] = field(default_factory=list)
    text_offsets: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop string or stop token that ended the choice; None for any other end."""
    prompt_scores: list[Score] = field(default_factory=list)

    def extend(self, later: "Delta") -> None:
        """Append a later delta of the same choice."""
        self.text += later.text
        self.tokens += later.tokens
        self.text_offsets += later.text_offsets
        self.prompt_scores += later.prompt_scores
        self.finish_reason, self.stop_reason = later.finish_reason, later.stop_reason
