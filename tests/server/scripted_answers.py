"""Makes a real server generate given texts, through a constraint that allows one token at a time.

The request's own constraint still applies: a text that it does not allow fails.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from fastapi import FastAPI

from nvium_core import Constraint
from server.generation.service import Service
from server.schemas.formats import OutputFormat
from server.structured_outputs.constraints import RequestConstraint
from tests.byte_model import token_ids

VOCABULARY = 257


class Scripted:
    """Allows only the next token of a script, if another constraint allows it too."""

    def __init__(self, token_ids: list[int], asked: Constraint | None) -> None:
        self._token_ids = token_ids
        self._asked = asked

    @property
    def is_over(self) -> bool:
        return self._asked is not None and self._asked.is_over

    def is_ready(self, seconds: float) -> bool:
        return self._asked is None or self._asked.is_ready(seconds)

    def allowed(self) -> bytes:
        asked = int.from_bytes(self._asked.allowed(), "little") if self._asked else -1
        return (asked & (1 << self._token_ids[0])).to_bytes(VOCABULARY // 8 + 1, "little")

    def advance(self, token_id: int) -> None:
        self._token_ids = self._token_ids[1:]
        if self._asked:
            self._asked.advance(token_id)

    def fork(self) -> "Scripted":
        return Scripted(self._token_ids, self._asked.fork() if self._asked else None)


@contextmanager
def answering(app: FastAPI, *answers: str | list[int]) -> Iterator[None]:
    """Answer the next requests with these texts or tokens in order, and check that all were used."""
    service: Service = app.state.service
    constraint, left = service.constraint, [*answers]

    async def scripted(output_format: OutputFormat | None) -> RequestConstraint:
        answer = left.pop(0)
        compiled = await constraint(output_format)
        tokens = [*(token_ids(answer) if isinstance(answer, str) else answer), 0]
        return compiled._replace(constraint=Scripted(tokens, compiled.constraint))

    service.constraint = scripted
    try:
        yield
    finally:
        service.constraint = constraint
    assert not left
