"""Attacks on a server, each with the statuses that are fair answers."""

import asyncio
import json
from asyncio import IncompleteReadError
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from tests.server.grammar_samples import COSTLY_PATTERNS, COSTLY_SCHEMAS, REFUSED_PATTERNS, chained
from tests.server.http.test_keys import bearer
from tests.server.raw_client import JSON, RawConnection, chunked, connected, request

COMPLETIONS, CHAT, TOKENIZE, HEALTH = "/v1/completions", "/v1/chat/completions", "/tokenize", "/livez"

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

    def post(self, body: bytes, path: str = COMPLETIONS, *, is_chunked: bool = False) -> bytes:
        return request(path, body, headers=JSON | bearer(self.key), is_chunked=is_chunked)

    def in_chunks(self, body: bytes, size: int) -> bytes:
        return self.post(b"", is_chunked=True).removesuffix(chunked(b"")) + chunked(body, size)


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
    num_answers: int = 1
    leaves_after: float | None = None

    async def statuses(self, target: Target) -> Counter[int]:
        """Attack the target and count the statuses of its responses."""
        found = Counter[int]()
        for data in self.requests(target):
            for statuses in await asyncio.gather(*(self._ask(target.url, data) for _ in range(self.times))):
                found.update(statuses)
        return found

    async def _ask(self, url: str, data: bytes) -> list[int]:
        async with connected(url) as connection:
            sending = asyncio.create_task(self._send(connection, data))
            try:
                if self.leaves_after is None:
                    return [(await connection.answer()).status for _ in range(self.num_answers)]
                await sending
                await asyncio.sleep(self.leaves_after)
                return [CLOSED]
            except (ConnectionError, IncompleteReadError):
                return [CLOSED]
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


def with_raw(field: str, value: str) -> bytes:
    """Return a body with a field whose value is inserted verbatim and need not be JSON."""
    return asking(**{"max_tokens": 1, field: "RAW"}).replace(b'"RAW"', value.encode())


def chatting(*messages: dict[str, Any]) -> bytes:
    return json.dumps({"model": "default", "max_tokens": 8, "messages": messages}).encode()


LARGE = 1_900_000
HUGE_NUMBERS = ("1e400", "-1e400", "NaN", "-Infinity", "9" * 4_000, "9" * 10_000, "9" * LARGE, "1e999999999")


def huge_numbers() -> Iterable[bytes]:
    for name in ("temperature", "top_p", "seed", "max_tokens", "n", "top_k", "min_tokens", "logprobs"):
        yield from (with_raw(name, number) for number in HUGE_NUMBERS)
    yield from (with_raw("prompt", f"[{number}]") for number in HUGE_NUMBERS)


def deep_json() -> Iterable[bytes]:
    for opened, closed in (("[", "]"), ('{"a":', "}")):
        depth = LARGE // len(opened + closed + "1")
        yield with_raw("x", opened * depth + "1" + closed * depth)
        yield with_raw("x", opened * depth)
    schema = '{"not":' * 800 + "{}" + "}" * 800
    yield with_raw("response_format", f'{{"type": "json_schema", "json_schema": {{"name": "x", "schema": {schema}}}}}')
    yield with_raw("structured_outputs", json.dumps({"json": "[" * 100_000}))


def deep_arguments() -> Iterable[bytes]:
    for arguments in ("[" * 500_000, "[" * 900 + "]" * 900):
        call = {"id": "a", "type": "function", "function": {"name": "a", "arguments": arguments}}
        answered = {"role": "tool", "tool_call_id": "a", "content": "a"}
        yield chatting({"role": "assistant", "tool_calls": [call]}, answered)


def regex_bombs() -> Iterable[bytes]:
    for regex in (*COSTLY_PATTERNS, *REFUSED_PATTERNS, "(.*a.*){50}", ".*a.{22}", "(" * 100_000):
        yield asking(structured_outputs={"regex": regex}, temperature=2, max_tokens=40)
    yield asking(structured_outputs={"choice": [f"v{number}" for number in range(100_000)]})


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


def with_schemas(schemas: Iterable[Any]) -> Iterable[bytes]:
    for schema in schemas:
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        yield asking(response_format=form, temperature=2, max_tokens=40)


PLACES = ("file:///etc/passwd", "http://127.0.0.1/x", "https://localhost/x")


def too_much() -> Iterable[bytes]:
    yield asking(n=128, max_tokens=10**18)
    yield asking(n=10**300)
    yield asking(prompt=["a"] * 1024, n=128)
    yield asking(best_of=10**9)
    yield asking(prompt=[[5] * 1000] * 250, max_tokens=0, echo=True, logprobs=20)


def too_many_entries() -> Iterable[bytes]:
    yield asking(stop=[str(number) for number in range(200_000)])
    yield asking(stop=[str(number) * 400_000 for number in range(4)])
    yield asking(stop_token_ids=list(range(250_000)))
    yield asking(logit_bias={str(number): 1 for number in range(100_000)})
    yield asking(logit_bias={"5": 1e308})


def too_many_fields() -> Iterable[bytes]:
    yield with_raw("x", "1, " + ", ".join(f'"{number}": 1' for number in range(150_000)))


def two_lengths(target: Target) -> Iterable[bytes]:
    yield target.post(b"0\r\n\r\n").replace(b"host:", b"transfer-encoding: chunked\r\nhost:")


MANY_LINES = {f"x-{number}": "y" for number in range(5_000)}

MANY_LISTS = "[" + "[]," * 600_000 + "1]"
LONG_TEXT = "once upon " * 190_000
LONG = posting(lambda: [asking(n=128, max_tokens=700)])
MUCH = posting(lambda: [asking(prompt=[[5] * 1000] * 250, max_tokens=0, echo=True, logprobs=1)])
STREAMED = posting(lambda: [asking(stream=True, max_tokens=700)])

ATTACKS = (
    Attack("slow heads, 50 clients", {CLOSED}, lambda t: [t.probe(x="y" * 5_000)], 50, SLOW_SECONDS),
    Attack("slow bodies, 50 clients", {408, CLOSED}, lambda t: [t.post(b" " * 5_000)], 50, SLOW_SECONDS),
    Attack("silent connections, 500", {CLOSED}, lambda _: [b""], 500),
    Attack("heads of 5,000 lines, 100 clients", {200}, lambda t: [t.probe(**MANY_LINES)], 100),
    Attack("a header of 10 MB", {400, CLOSED}, lambda t: [t.probe(x="y" * 10_000_000)]),
    Attack("two lengths of one body", {400}, two_lengths),
    Attack("a body of single bytes", {400, CLOSED}, lambda t: [t.in_chunks(b" " * 1_000_000, size=1)]),
    Attack("a body without end", {413, CLOSED}, lambda t: [t.in_chunks(b" " * 10_000_000, size=100_000)]),
    Attack("large bodies, 40 clients", {200, 400, 503, CLOSED}, posting(lambda: [with_raw("x", MANY_LISTS)]), 40),
    Attack("pipelined requests, 2,000", {200}, lambda t: [t.probe() * 2_000], num_answers=2_000),
    Attack("huge numbers", {400}, posting(huge_numbers)),
    Attack("deep JSON", {400}, posting(deep_json)),
    Attack("deep JSON in a call's arguments", {200, 400}, posting(deep_arguments, CHAT)),
    Attack("150,000 unknown fields", {400}, posting(too_many_fields)),
    Attack("a prompt of 100,000 token ids", {400}, posting(lambda: [asking(prompt=[5] * 100_000)])),
    Attack("a prompt of 1.9 MB", {400}, posting(lambda: [asking(prompt="a" * LARGE)])),
    Attack("the same in a chat", {400}, posting(lambda: [chatting({"role": "user", "content": "a" * LARGE})], CHAT)),
    Attack("1,024 prompts of 60 token ids", {200}, posting(lambda: [asking(prompt=[[5] * 60] * 1024, max_tokens=1)])),
    Attack("n × max_tokens", {400}, posting(too_much)),
    Attack("128 choices of 700 tokens, then gone", {CLOSED}, LONG, leaves_after=LEAVES_AFTER_SECONDS),
    Attack("250,000 scores, then gone", {CLOSED}, MUCH, leaves_after=LEAVES_AFTER_SECONDS),
    Attack("many stop strings and biases", {400}, posting(too_many_entries)),
    Attack("regex bombs", {200, 400}, posting(regex_bombs)),
    Attack("schema bombs", {200, 400}, posting(lambda: with_schemas(SCHEMAS))),
    Attack("references to files and addresses", {400}, posting(lambda: with_schemas({"$ref": x} for x in PLACES))),
    Attack("texts of 1.9 MB to tokenize, 4 clients", {200}, posting(lambda: [asking(prompt=LONG_TEXT)], TOKENIZE), 4),
    Attack("requests at once, 1,000", {200, 503}, posting(lambda: [asking(max_tokens=1)]), 1_000),
    Attack("requests that leave at once, 1,000", {CLOSED}, STREAMED, 1_000, leaves_after=0),
)
