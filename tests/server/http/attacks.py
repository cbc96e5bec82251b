"""Attacks on a server, each with the statuses that are fair answers."""

import asyncio
import json
from asyncio import IncompleteReadError
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from tests.server.grammar_samples import COSTLY_GRAMMARS, COSTLY_SCHEMAS, chained
from tests.server.http.test_keys import bearer
from tests.server.raw_client import JSON, RawConnection, connected, request

COMPLETIONS, TOKENIZE, HEALTH = "/v1/completions", "/tokenize", "/livez"

CLOSED = 0
"""Instead of a status: the connection closed without a response, or while the client was still sending."""

SLOW_SECONDS = 0.1
"""Pause between the bytes of a slow client."""

LEAVES_AFTER_SECONDS = 2


@dataclass(frozen=True)
class Target:
    """A server's URL, and a key for it."""

    url: str
    key: str

    def probe(self, **headers: str) -> bytes:
        return request(HEALTH, method="GET", headers=headers)

    def post(self, body: bytes, path: str = COMPLETIONS) -> bytes:
        return request(path, body, headers=JSON | bearer(self.key))


@dataclass(frozen=True)
class Attack:
    """Requests sent one after another, each on `times` connections at once. `fair` are the acceptable statuses.

    `pause` is the time between two bytes. After `leaves_after` seconds, clients disconnect without reading.
    """

    name: str
    fair: set[int]
    requests: Callable[[Target], Iterable[bytes]]
    times: int = 1
    pause: float = 0
    leaves_after: float | None = None

    async def statuses(self, target: Target) -> Counter[int]:
        """Attack the target and count the statuses of its responses."""
        found = Counter[int]()
        for data in self.requests(target):
            found.update(await asyncio.gather(*(self._ask(target.url, data) for _ in range(self.times))))
        return found

    async def _ask(self, url: str, data: bytes) -> int:
        async with connected(url) as connection:
            sending = asyncio.create_task(self._send(connection, data))
            try:
                if self.leaves_after is None:
                    return (await connection.answer()).status
                await sending
                await asyncio.sleep(self.leaves_after)
                return CLOSED
            except (ConnectionError, IncompleteReadError):
                return CLOSED
            finally:
                sending.cancel()
                connection.writer.transport.abort()

    async def _send(self, connection: RawConnection, data: bytes) -> None:
        for piece in [bytes([byte]) for byte in data] if self.pause else [data]:
            await connection.send(piece)
            await asyncio.sleep(self.pause)


def posting(bodies: Callable[[], Iterable[bytes]], path: str = COMPLETIONS) -> Callable[[Target], Iterable[bytes]]:
    return lambda target: (target.post(body, path) for body in bodies())


def asking(**fields: Any) -> bytes:
    return json.dumps({"model": "default", "prompt": "Once", "max_tokens": 8, **fields}).encode()


SCHEMAS: tuple[Any, ...] = (
    *COSTLY_SCHEMAS.values(),
    chained(40, lambda _, rest: {"anyOf": [rest, {"type": "array", "items": rest}]}, {"type": "string"}),
    {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    {"anyOf": [{"type": "array", "minItems": number, "items": {"$ref": "#"}} for number in range(1000)]},
    {"type": "integer", "minimum": 10**300, "multipleOf": 10**9 + 7},
    {"allOf": [{"type": "string", "pattern": f"a.{{{number}}}b"} for number in range(3, 60)]},
    {"type": "object", "properties": {f"p{number}": {} for number in range(3_000)}},
    {"enum": [f"v{number}" for number in range(100_000)]},
)


def bombs() -> Iterable[bytes]:
    forms = [*({"json": schema} for schema in SCHEMAS), *({"grammar": grammar} for grammar in COSTLY_GRAMMARS.values())]
    return [asking(structured_outputs=form, temperature=2, max_tokens=40) for form in forms]


MANY_LINES = {f"x-{number}": "y" for number in range(5_000)}

MANY_LISTS = posting(lambda: [asking(x="RAW").replace(b'"RAW"', b"[" + b"[]," * 600_000 + b"1]")])
LONG_TEXT = "once upon " * 190_000
LONG = posting(lambda: [asking(n=128, max_tokens=700)])
MUCH = posting(lambda: [asking(prompt=[[5] * 1000] * 250, max_tokens=0, echo=True, logprobs=1)])
STREAMED = posting(lambda: [asking(stream=True, max_tokens=700)])

ATTACKS = (
    Attack("slow heads, 50 clients", {CLOSED}, lambda t: [t.probe(x="y" * 5_000)], 50, SLOW_SECONDS),
    Attack("slow bodies, 50 clients", {408, CLOSED}, lambda t: [t.post(b" " * 5_000)], 50, SLOW_SECONDS),
    Attack("silent connections, 500", {CLOSED}, lambda _: [b""], 500),
    Attack("heads of 5,000 lines, 100 clients", {200}, lambda t: [t.probe(**MANY_LINES)], 100),
    Attack("large bodies, 40 clients", {200, 400, 503, CLOSED}, MANY_LISTS, 40),
    Attack("128 choices of 700 tokens, then gone", {CLOSED}, LONG, leaves_after=LEAVES_AFTER_SECONDS),
    Attack("250,000 scores, then gone", {CLOSED}, MUCH, leaves_after=LEAVES_AFTER_SECONDS),
    Attack("schema and grammar bombs", {200, 400}, posting(bombs)),
    Attack("texts of 1.9 MB to tokenize, 4 clients", {200}, posting(lambda: [asking(prompt=LONG_TEXT)], TOKENIZE), 4),
    Attack("requests that leave at once, 1,000", {CLOSED}, STREAMED, 1_000, leaves_after=0),
)
