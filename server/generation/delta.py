"""The new text, tokens and scores of one choice, as the writers receive them."""

from dataclasses import dataclass, field

from nvium_core import FinishReason, Score, TokenEvent


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
    stop_reason: int | str | None = None
    """The stop string or stop token that ended the choice, otherwise None."""
    prompt_scores: list[Score] = field(default_factory=list)
    """Scores of prompt tokens that arrived since the last delta."""

    def extend(self, later: "Delta") -> None:
        self.text += later.text
        self.tokens += later.tokens
        self.text_offsets += later.text_offsets
        self.prompt_scores += later.prompt_scores
        self.finish_reason, self.stop_reason = later.finish_reason, later.stop_reason
