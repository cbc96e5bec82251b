"""Limits the reasoning of an answer. A constraint on the answer begins behind the reasoning."""

from collections.abc import Sequence
from copy import copy
from typing import NamedTuple

from nvium_core import Constraint
from nvium_core.text.answer_parsers import ReasoningParser
from nvium_core.text.detokenizer import TokenBytes


class Tags(NamedTuple):
    """The vocabulary, and the tokens of the tags around reasoning."""

    vocabulary: TokenBytes
    vocab_size: int
    opening: Sequence[int]
    closing: Sequence[int]


class ReasoningBudget:
    """A constraint that allows every token until the reasoning has `budget` tokens, and then only its closing tag.

    `answer` constrains the tokens behind the reasoning. If the answer may begin with reasoning, the opening tag is
    allowed too. A budget of None is no limit. `parser` knows how the answer begins.
    """

    def __init__(self, tags: Tags, parser: ReasoningParser, budget: int | None, answer: Constraint | None) -> None:
        self._tags = tags
        self.parser = parser
        self._num_left = budget
        self.answer = answer
        self._may_open = answer is not None and parser.state == "start"
        self._is_reasoning = parser.state == "thinking"
        self._forced: Sequence[int] = ()
        """Tokens that must come next."""
        self._close_if_due()

    @property
    def is_over(self) -> bool:
        return self._begun is not None and self._begun.is_over

    def is_ready(self, seconds: float) -> bool:
        return self._begun is None or self._begun.is_ready(seconds)

    def allowed(self) -> bytes:
        if self._forced:
            return with_token(b"", self._forced[0])
        if self._begun is None:
            return b"\xff" * (self._tags.vocab_size // 8 + 1)
        allowed = self._begun.allowed()
        return with_token(allowed, self._tags.opening[0]) if self._may_open else allowed

    def advance(self, token_id: int) -> None:
        was_thinking = self.parser.state == "thinking"
        if self._may_open and self._opens(token_id):
            self._is_reasoning, self._forced = True, self._tags.opening
        if self._begun is not None:
            self._begun.advance(token_id)
        self._may_open, self._forced = False, self._forced[1:]
        self.parser.push(self._tags.vocabulary[token_id].decode(errors="replace"))
        if was_thinking and self._num_left:
            self._num_left -= 1
        self._is_reasoning &= self.parser.state in ("start", "thinking")
        self._close_if_due()

    def fork(self) -> "ReasoningBudget":
        forked = copy(self)
        forked.parser = copy(self.parser)
        forked.answer = None if self.answer is None else self.answer.fork()
        return forked

    @property
    def _begun(self) -> Constraint | None:
        """The constraint on the answer, or None during the reasoning."""
        return None if self._is_reasoning else self.answer

    def _close_if_due(self) -> None:
        if self._num_left == 0 and self.parser.state == "thinking":
            self._forced, self._num_left = self._tags.closing, None

    def _opens(self, token_id: int) -> bool:
        """Return whether the token begins the opening tag. In doubt, it begins the answer."""
        first, *rest = self._tags.opening
        allowed = self._begun.allowed() if rest and self._begun is not None else b""
        return token_id == first and with_token(allowed, token_id) != allowed


def with_token(mask: bytes, token_id: int) -> bytes:
    """Return a constraint's mask that also allows this token."""
    place, bit = divmod(token_id, 8)
    changed = bytearray(mask.ljust(place + 1, b"\0"))
    changed[place] |= 1 << bit
    return bytes(changed)
