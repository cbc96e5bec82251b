"""Constraints on the next token of a sequence. They know token ids only: no text, grammars or devices."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from nvium_core.engine.errors import ConstraintLimit, EngineError

PATIENCE_SECONDS, MAX_PATIENCE_SECONDS = 0.0003, 0.005
"""Steps wait for a slow constraint until its time budget is used up. Seconds added per token, and maximum budget."""

logger = logging.getLogger(__name__)


class TooCostly(Exception):
    """Raised by a constraint that cannot continue within its cost limits. The client reads the message."""


class Constraint(Protocol):
    """Decides which tokens may come next. A request's constraint is a prototype: each choice gets a fork.

    Used by one thread at a time. If a method raises, only the constrained sequence ends.
    """

    @property
    def is_over(self) -> bool:
        """Whether the output is complete: no token may follow, not even end-of-text."""

    def is_ready(self, seconds: float) -> bool:
        """Wait up to `seconds`. Return whether `is_over` and `allowed` now return without blocking."""

    def allowed(self) -> bytes:
        """Return the bit mask of allowed tokens: bit t % 8 of byte t // 8 for token t. Missing bits are zeros."""

    def advance(self, token_id: int) -> None: ...

    def fork(self) -> "Constraint":
        """Return a copy that can be advanced independently."""


class ConstraintState:
    """The constraint of one sequence. After a failure no token is allowed, and its first error remains."""

    def __init__(self, prototype: Constraint) -> None:
        self.is_over = False
        self.error: EngineError | None = None
        self.patience = MAX_PATIENCE_SECONDS
        """Remaining time budget: seconds that Steps may wait for the next mask."""
        self._allowed: bytes | None = None
        with self._contain_errors():
            self._constraint = prototype.fork()

    @property
    def allowed(self) -> bytes:
        if self._allowed is None:
            with self._contain_errors():
                self._allowed = self._constraint.allowed()
        return self._allowed or b""

    def advance(self, token_id: int) -> None:
        self.patience = min(self.patience + PATIENCE_SECONDS, MAX_PATIENCE_SECONDS)
        with self._contain_errors():
            self._allowed = None
            self._constraint.advance(token_id)

    def is_ready(self, seconds: float) -> bool:
        if self.error is not None:
            return True
        with self._contain_errors():
            if not self._constraint.is_ready(seconds):
                return False
            self.is_over = self._constraint.is_over
        return True

    def allows_any(self, vocab_size: int) -> bool:
        return int.from_bytes(self.allowed, "little") & ((1 << vocab_size) - 1) != 0

    @contextmanager
    def _contain_errors(self) -> Iterator[None]:
        try:
            yield
        except TooCostly as error:
            self.error = ConstraintLimit(f"the request's constraint ended: {error}")
            self._allowed = b""
        except (KeyboardInterrupt, MemoryError):
            raise  # not the constraint's fault
        except BaseException:  # a panic in a Rust library is not an Exception
            logger.exception("a constraint failed; its sequence will end")
            self.error = EngineError("the request's constraint failed")
            self._allowed = b""
