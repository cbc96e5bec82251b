"""What a sequence may say: a constraint decides, token by token, which tokens may come next.

Knows token ids only: no text, no grammars, no devices.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

logger = logging.getLogger(__name__)


class TooCostly(Exception):
    """Raised by a constraint that cannot be followed further within bounds."""


class Constraint(Protocol):
    """Which token may follow those it has been advanced by. A request's own is a prototype, forked for each choice.

    Used by one thread at a time. Whatever it raises ends the sequence that it constrains, and no other.
    """

    @property
    def is_over(self) -> bool:
        """Nothing may follow, not even end-of-text."""
        ...

    def allowed(self) -> bytes:
        """The tokens that may come next: token t if bit t % 8 of byte t // 8 is set. Those beyond its end may not."""
        ...

    def advance(self, token_id: int) -> None:
        """Take the next token."""
        ...

    def fork(self) -> "Constraint":
        """The same state, to be advanced independently."""
        ...


class ConstraintState:
    """One sequence's own constraint, asked once per token. It does not raise: one that has failed allows nothing."""

    def __init__(self, prototype: Constraint) -> None:
        self.is_over = False
        self.has_failed = False
        self.is_too_costly = False
        self._allowed: bytes | None = None
        """Computed at the first use."""
        with self._contained():
            self._constraint = prototype.fork()

    @property
    def allowed(self) -> bytes:
        """`Constraint.allowed` for the next token."""
        if self._allowed is None:
            with self._contained():
                self._allowed = self._constraint.allowed()
        return self._allowed or b""

    def advance(self, token_id: int) -> None:
        """Advance by an emitted token."""
        with self._contained():
            self._constraint.advance(token_id)
            self.is_over = self._constraint.is_over
            self._allowed = None

    def allows_any(self, vocab_size: int) -> bool:
        """Whether the next token may be any of the first `vocab_size`."""
        return int.from_bytes(self.allowed, "little") & ((1 << vocab_size) - 1) != 0

    @contextmanager
    def _contained(self) -> Iterator[None]:
        try:
            yield
        except TooCostly:
            self.is_too_costly = True
            self._allowed = b""
        except BaseException:  # a panic of a library in Rust is no Exception
            logger.exception("a constraint failed, and its sequence with it")
            self.has_failed = True
            self._allowed = b""
