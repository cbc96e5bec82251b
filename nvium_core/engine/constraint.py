"""Constraints on what a sequence may generate, token by token. Token ids only: no text, grammars or devices."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

PATIENCE_SECONDS, MAX_PATIENCE_SECONDS = 0.0003, 0.005
"""How long a Step waits for a slow constraint's mask: added per token of its sequence, and at most."""

logger = logging.getLogger(__name__)


class TooCostly(Exception):
    """Raised by a constraint that cannot be followed further within bounds."""


class Constraint(Protocol):
    """Decides which token may come next. A request's constraint is a prototype that is forked for each choice.

    Used by one thread at a time. An exception from it ends only the sequence that it constrains.
    """

    @property
    def is_over(self) -> bool:
        """No token may follow, not even end-of-text."""
        ...

    def is_ready(self, seconds: float) -> bool:
        """Wait up to `seconds`; returns whether `is_over` and `allowed` can answer without blocking."""
        ...

    def allowed(self) -> bytes:
        """Bit mask of allowed tokens: token t is allowed if bit t % 8 of byte t // 8 is set. Tokens beyond the end are
        not."""
        ...

    def advance(self, token_id: int) -> None:
        """Take the next token."""
        ...

    def fork(self) -> "Constraint":
        """A copy that can be advanced independently."""
        ...


class ConstraintState:
    """The constraint of one sequence. Never raises: after a failure it allows nothing."""

    def __init__(self, prototype: Constraint) -> None:
        self.is_over = False
        self.has_failed = False
        self.is_too_costly = False
        self.patience = MAX_PATIENCE_SECONDS
        """How long the next Step may wait for this mask, in seconds."""
        self._allowed: bytes | None = None
        """Computed on first use."""
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
        self.patience = min(self.patience + PATIENCE_SECONDS, MAX_PATIENCE_SECONDS)
        with self._contained():
            self._allowed = None
            self._constraint.advance(token_id)

    def is_ready(self, seconds: float) -> bool:
        """Wait up to `seconds`; returns whether the mask of the next token is ready."""
        with self._contained():
            if not self._constraint.is_ready(seconds):
                return False
            self.is_over = self._constraint.is_over
        return True

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
