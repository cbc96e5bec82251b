"""Attacks on a server, each with the statuses that are fair answers."""

import asyncio
import json
from asyncio import IncompleteReadError
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
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

Statuses = Counter[int]
Work = Callable[["Target"], Awaitable[Statuses]]


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

    async def status_of(self, data: bytes, pause: float = 0) -> int:
        """Send bytes, with a pause after each byte if given, and return the status of the response."""
        async with connected(self.url) as connection:
            sending = asyncio.create_task(send(connection, data, pause))
            try:
                return (await connection.answer()).status
            except (ConnectionError, IncompleteReadError):
                return CLOSED
            finally:
                sending.cancel()
                connection.writer.transport.abort()

    async def leave(self, data: bytes, after: float = 0) -> int:
        """Send, wait, and disconnect without reading."""
        async with connected(self.url) as connection:
            await connection.send(data)
            await asyncio.sleep(after)
            connection.writer.transport.abort()
        return CLOSED


async def send(connection: RawConnection, data: bytes, pause: float) -> None:
    pieces = [bytes([byte]) for byte in data] if pause else [data]
    for piece in pieces:
        await connection.send(piece)
        await asyncio.sleep(pause)


@dataclass(frozen=True)
class Attack:
    """`fair` are the acceptable statuses."""

    name: str
    fair: frozenset[int]
    work: Work


def at_once(name: str, fair: set[int], make: Callable[[Target], bytes], times: int = 1, pause: float = 0) -> Attack:
    """Send the same request on `times` connections at once."""

    async def work(target: Target) -> Statuses:
        data = make(target)
        return Counter(await asyncio.gather(*(target.status_of(data, pause) for _ in range(times))))

    return Attack(name, frozenset(fair), work)


def in_turn(name: str, fair: set[int], bodies: Callable[[], Iterable[bytes]], path: str = COMPLETIONS) -> Attack:
    """Send bodies one after another."""

    async def work(target: Target) -> Statuses:
        return Counter([await target.status_of(target.post(body, path)) for body in bodies()])

    return Attack(name, frozenset(fair), work)


def leaving(name: str, fields: dict[str, Any], times: int, after: float) -> Attack:
    """Send valid requests and disconnect."""

    async def work(target: Target) -> Statuses:
        data = target.post(asking(**fields))
        return Counter(await asyncio.gather(*(target.leave(data, after) for _ in range(times))))

    return Attack(name, frozenset({CLOSED}), work)


def asking(**fields: Any) -> bytes:
    return json.dumps({"model": "default", "prompt": "Once", "max_tokens": 8, **fields}).encode()


def with_raw(field: str, value: str) -> bytes:
    """Return a body with a field whose value is inserted verbatim and need not be JSON."""
    return asking(**{"max_tokens": 1, field: "RAW"}).replace(b'"RAW"', value.encode())


def chatting(**fields: Any) -> bytes:
    return json.dumps({"model": "default", "max_tokens": 8, **fields}).encode()


HUGE_NUMBERS = ("1e400", "-1e400", "NaN", "-Infinity", "9" * 4_000, "9" * 10_000, "9" * 1_900_000, "1e999999999")


def huge_numbers() -> Iterable[bytes]:
    for name in ("temperature", "top_p", "seed", "max_tokens", "n", "top_k", "min_tokens", "logprobs"):
        yield from (with_raw(name, number) for number in HUGE_NUMBERS)
    yield from (with_raw("prompt", f"[{number}]") for number in HUGE_NUMBERS)


def deep_json() -> Iterable[bytes]:
    for opened, closed in (("[", "]"), ('{"a":', "}")):
        depth = 1_900_000 // len(opened + closed + "1")
        yield with_raw("x", opened * depth + "1" + closed * depth)
        yield with_raw("x", opened * depth)
    schema = '{"not":' * 800 + "{}" + "}" * 800
    yield with_raw("response_format", f'{{"type": "json_schema", "json_schema": {{"name": "x", "schema": {schema}}}}}')
    yield with_raw("structured_outputs", json.dumps({"json": "[" * 100_000}))


def deep_arguments() -> Iterable[bytes]:
    for arguments in ("[" * 500_000, "[" * 900 + "]" * 900):
        call = {"id": "a", "type": "function", "function": {"name": "a", "arguments": arguments}}
        answered = {"role": "tool", "tool_call_id": "a", "content": "a"}
        yield chatting(messages=[{"role": "assistant", "tool_calls": [call]}, answered])


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


async def stay_silent(target: Target) -> Statuses:
    return Counter(await asyncio.gather(*(target.status_of(b"") for _ in range(500))))


async def pipeline(target: Target) -> Statuses:
    async with connected(target.url) as connection:
        sending = asyncio.create_task(connection.send(target.probe() * 2_000))
        statuses = Counter([(await connection.answer()).status for _ in range(2_000)])
        await sending
    return statuses


MANY_LINES = {f"x-{number}": "y" for number in range(5_000)}

ATTACKS = (
    at_once("slow heads, 50 clients", {CLOSED}, lambda t: t.probe(x="y" * 5_000), 50, SLOW_SECONDS),
    at_once("slow bodies, 50 clients", {408, CLOSED}, lambda t: t.post(b" " * 5_000), 50, SLOW_SECONDS),
    Attack("silent connections, 500", frozenset({CLOSED}), stay_silent),
    at_once("heads of 5,000 lines, 100 clients", {200}, lambda t: t.probe(**MANY_LINES), 100),
    at_once("a header of 10 MB", {400, CLOSED}, lambda t: t.probe(x="y" * 10_000_000)),
    at_once(
        "two lengths of one body",
        {400},
        lambda t: t.post(b"0\r\n\r\n").replace(b"host:", b"transfer-encoding: chunked\r\nhost:"),
    ),
    at_once("a body of single bytes", {400, CLOSED}, lambda t: t.in_chunks(b" " * 1_000_000, size=1)),
    at_once("a body without end", {413, CLOSED}, lambda t: t.in_chunks(b" " * 10_000_000, size=100_000)),
    at_once(
        "large bodies, 40 clients",
        {200, 400, 503, CLOSED},
        lambda t: t.post(with_raw("x", "[" + "[]," * 600_000 + "1]")),
        40,
    ),
    Attack("pipelined requests, 2,000", frozenset({200}), pipeline),
    in_turn("huge numbers", {400}, huge_numbers),
    in_turn("deep JSON", {400}, deep_json),
    in_turn("deep JSON in a call's arguments", {200, 400}, deep_arguments, CHAT),
    in_turn(
        "150,000 unknown fields", {400}, lambda: [with_raw("x", "1, " + ", ".join(f'"{n}": 1' for n in range(150_000)))]
    ),
    in_turn("a prompt of 100,000 token ids", {400}, lambda: [asking(prompt=[5] * 100_000)]),
    in_turn("a prompt of 1.9 MB", {400}, lambda: [asking(prompt="a" * 1_900_000)]),
    in_turn(
        "the same in a chat", {400}, lambda: [chatting(messages=[{"role": "user", "content": "a" * 1_900_000}])], CHAT
    ),
    in_turn("1,024 prompts of 60 token ids", {200}, lambda: [asking(prompt=[[5] * 60] * 1024, max_tokens=1)]),
    in_turn("n × max_tokens", {400}, too_much),
    leaving("128 choices of 700 tokens, then gone", {"n": 128, "max_tokens": 700}, 1, LEAVES_AFTER_SECONDS),
    leaving(
        "250,000 scores, then gone",
        {"prompt": [[5] * 1000] * 250, "max_tokens": 0, "echo": True, "logprobs": 1},
        1,
        LEAVES_AFTER_SECONDS,
    ),
    in_turn("many stop strings and biases", {400}, too_many_entries),
    in_turn("regex bombs", {200, 400}, regex_bombs),
    in_turn("schema bombs", {200, 400}, lambda: with_schemas(SCHEMAS)),
    in_turn("references to files and addresses", {400}, lambda: with_schemas({"$ref": place} for place in PLACES)),
    at_once(
        "texts of 1.9 MB to tokenize, 4 clients",
        {200},
        lambda t: t.post(asking(prompt="once upon " * 190_000), TOKENIZE),
        4,
    ),
    at_once("requests at once, 1,000", {200, 503}, lambda t: t.post(asking(max_tokens=1)), 1_000),
    leaving("requests that leave at once, 1,000", {"stream": True, "max_tokens": 700}, 1_000, 0),
)
