"""Attacks over raw sockets, each with its acceptable statuses, and a client that streams during an attack."""

import asyncio
import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

COMPLETIONS, CHAT, TOKENIZE, HEALTH = "/v1/completions", "/v1/chat/completions", "/tokenize", "/livez"

CLOSED = 0
"""Instead of a status: the connection closed without a response, or while the client was still sending."""

UNANSWERED = -1
"""Instead of a status: no response in time."""

SLOW_SECONDS = 0.1
"""Pause between the bytes of a slow client."""

LEAVES_AFTER_SECONDS = 2

BACKLOG_BYTES = 2**22
SAMPLING_SECONDS = 0.05
MAX_SILENCE_SECONDS = 60

Statuses = Counter[int]
Work = Callable[["Target"], Awaitable[Statuses]]


@dataclass(frozen=True)
class Target:
    """A server's address, and a key for it."""

    host: str
    port: int
    key: str | None = None

    def head(self, path: str, *headers: str, method: str = "POST") -> bytes:
        """Return a request's head without its final empty line."""
        own = [f"authorization: Bearer {self.key}"] if self.key else []
        lines = [f"{method} {path} HTTP/1.1", f"host: {self.host}", "connection: close", *own, *headers]
        return "".join(f"{line}\r\n" for line in lines).encode("latin-1")

    def post(self, body: bytes, path: str = COMPLETIONS) -> bytes:
        return self.head(path, "content-type: application/json", f"content-length: {len(body)}") + b"\r\n" + body

    def chunked(self, pieces: Iterable[bytes]) -> bytes:
        head = self.head(COMPLETIONS, "content-type: application/json", "transfer-encoding: chunked") + b"\r\n"
        return head + b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)

    async def status_of(self, data: bytes, pause: float = 0) -> int:
        """Send bytes, with a pause after each byte if given, and return the status of the response."""
        reader, writer = await asyncio.open_connection(self.host, self.port, limit=BACKLOG_BYTES)
        try:
            sending = asyncio.create_task(send(writer, data, pause))
            try:
                line = await reader.readline()
                while await reader.read(2**16):
                    pass
            finally:
                sending.cancel()
            return int(line.split()[1]) if line else CLOSED
        except ConnectionError:
            return CLOSED
        finally:
            writer.transport.abort()

    async def leave(self, data: bytes, after: float = 0) -> int:
        """Send, wait, and disconnect without reading."""
        _, writer = await asyncio.open_connection(self.host, self.port)
        writer.write(data)
        await asyncio.sleep(after)
        writer.transport.abort()
        return CLOSED


async def send(writer: asyncio.StreamWriter, data: bytes, pause: float) -> None:
    with suppress(ConnectionError):
        for start in range(0, len(data), 1 if pause else len(data)):
            writer.write(data[start : start + 1] if pause else data)
            await writer.drain()
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
    others = {name: value for name, value in {"max_tokens": 1}.items() if name != field}
    return asking(**others).removesuffix(b"}").replace(b'"max_tokens": 8, ', b"") + f', "{field}": {value}}}'.encode()


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
    yield with_raw("response_format", json_schema_text('{"not":' * 800 + "{}" + "}" * 800))
    yield with_raw("structured_outputs", json.dumps({"json": "[" * 100_000}))


def deep_arguments() -> Iterable[bytes]:
    for arguments in ("[" * 500_000, "[" * 900 + "]" * 900):
        call = {"id": "a", "type": "function", "function": {"name": "a", "arguments": arguments}}
        answered = {"role": "tool", "tool_call_id": "a", "content": "a"}
        yield chatting(messages=[{"role": "assistant", "tool_calls": [call]}, answered])


def json_schema_text(schema: str) -> str:
    return f'{{"type": "json_schema", "json_schema": {{"name": "x", "schema": {schema}}}}}'


REGEXES = (
    "(a{1000}){1000}",
    "(" * 9 + "a" + "{9})" * 9,
    "(.*a.*){50}",
    ".*a.{22}",
    "(a|aa|aaa)+b",
    r"(\w|\p{L}|\d){1,1000}",
    "." * 99_000,
    "|".join(map(str, range(16_000))),
    "(" * 100_000,
)


def regex_bombs() -> Iterable[bytes]:
    yield from (asking(structured_outputs={"regex": regex}, temperature=2, max_tokens=40) for regex in REGEXES)
    yield asking(structured_outputs={"choice": [f"v{number}" for number in range(100_000)]})


def chained(link: Callable[[dict[str, str]], Any], length: int) -> dict[str, Any]:
    """Return definitions that each reference the next one."""
    links = {f"d{number}": link({"$ref": f"#/$defs/d{number + 1}"}) for number in range(length)}
    return {"$defs": {**links, f"d{length}": {"type": "string"}}, "$ref": "#/$defs/d0"}


SCHEMAS: tuple[Any, ...] = (
    chained(lambda ref: {"type": "object", "properties": {"a": ref, "b": ref}, "required": ["a", "b"]}, 60),
    chained(lambda ref: {"allOf": [ref, ref]}, 40),
    chained(lambda ref: {"anyOf": [ref, {"type": "array", "items": ref}]}, 40),
    {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    {"anyOf": [{"type": "array", "minItems": number, "items": {"$ref": "#"}} for number in range(1000)]},
    {"type": "string", "minLength": 10**9},
    {"type": "array", "minItems": 10**9, "items": {"type": "string", "minLength": 1000}},
    {"type": "integer", "minimum": 10**300, "multipleOf": 10**9 + 7},
    {"allOf": [{"type": "string", "pattern": f"a.{{{number}}}b"} for number in range(3, 60)]},
    {"type": "object", "properties": {f"p{number}": {} for number in range(3_000)}},
    {"enum": [f"v{number}" for number in range(100_000)]},
)


def schema_bombs() -> Iterable[bytes]:
    for schema in SCHEMAS:
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        yield asking(response_format=form, temperature=2, max_tokens=40)


def references() -> Iterable[bytes]:
    for place in ("file:///etc/passwd", "http://127.0.0.1/x", "https://localhost/x"):
        yield asking(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": place}}})


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
    """Pipeline 2,000 requests on one connection."""
    one = target.head(HEALTH, method="GET").replace(b"connection: close\r\n", b"") + b"\r\n"
    reader, writer = await asyncio.open_connection(target.host, target.port, limit=BACKLOG_BYTES)
    statuses = Statuses()
    try:
        sending = asyncio.create_task(send(writer, one * 2_000, 0))
        while statuses.total() < 2_000 and (line := await reader.readline()):
            if line.startswith(b"HTTP/1.1 ") or b"}HTTP/1.1 " in line:
                statuses[int(line.rpartition(b"HTTP/1.1 ")[2].split()[0])] += 1
        sending.cancel()
    finally:
        writer.transport.abort()
    return statuses


MANY_LINES = tuple(f"x-{number}: y" for number in range(5_000))

ATTACKS = (
    at_once("slow heads, 50 clients", {408, CLOSED}, lambda t: t.head(HEALTH, "x: " + "y" * 5_000), 50, SLOW_SECONDS),
    at_once("slow bodies, 50 clients", {408, CLOSED}, lambda t: t.post(b" " * 5_000), 50, SLOW_SECONDS),
    Attack("silent connections, 500", frozenset({CLOSED}), stay_silent),
    at_once("heads of 5,000 lines, 100 clients", {431, CLOSED}, lambda t: t.head(HEALTH, *MANY_LINES) + b"\r\n", 100),
    at_once("a header of 10 MB", {431, CLOSED}, lambda t: t.head(HEALTH, "x: " + "y" * 10_000_000)),
    at_once(
        "two lengths of one body",
        {400},
        lambda t: t.post(b"0\r\n\r\n").replace(b"host:", b"transfer-encoding: chunked\r\nhost:"),
    ),
    at_once("a body of single bytes", {400, CLOSED}, lambda t: t.chunked([b" "] * 1_000_000)),
    at_once("a body without end", {413, CLOSED}, lambda t: t.chunked([b" " * 100_000] * 100)),
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
    in_turn("schema bombs", {200, 400}, schema_bombs),
    in_turn("references to files and addresses", {400}, references),
    at_once(
        "texts of 1.9 MB to tokenize, 4 clients",
        {200},
        lambda t: t.post(asking(prompt="once upon " * 190_000), TOKENIZE),
        4,
    ),
    at_once("requests at once, 1,000", {200, 503}, lambda t: t.post(asking(max_tokens=1)), 1_000),
    leaving("requests that leave at once, 1,000", {"stream": True, "max_tokens": 700}, 1_000, 0),
)


async def tried(attack: Attack, target: Target, patience: float) -> Statuses:
    """Run an attack. Return its statuses, or `UNANSWERED` after `patience` seconds."""
    try:
        async with asyncio.timeout(patience):
            return await attack.work(target)
    except TimeoutError:
        return Statuses({UNANSWERED: 1})


@dataclass
class Neighbour:
    """Streams one response after another in a thread. `waits` are the end and duration of each wait for a chunk."""

    target: Target
    max_tokens: int
    waits: list[tuple[float, float]] = field(default_factory=list)
    num_failed: int = 0

    def run(self, is_over: threading.Event) -> None:
        fields = {"stream": True, "ignore_eos": True, "temperature": 1, "prompt": "Once upon a time"}
        data = self.target.post(asking(**fields, max_tokens=self.max_tokens))
        while not is_over.is_set():
            try:
                self._stream(data, is_over)
            except OSError:
                self.num_failed += 1
                time.sleep(SAMPLING_SECONDS)

    def _stream(self, data: bytes, is_over: threading.Event) -> None:
        last = time.monotonic()
        address = self.target.host, self.target.port
        with socket.create_connection(address, timeout=MAX_SILENCE_SECONDS) as connection:
            connection.sendall(data)
            with connection.makefile("rb") as answer:
                self.num_failed += b" 200 " not in answer.readline()
                for line in answer:
                    if line.startswith(b'data: {"id"'):
                        now = time.monotonic()
                        self.waits.append((now, now - last))
                        last = now
                    if is_over.is_set():
                        break


def anonymous_mb(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon:"))


async def sample_memory(pid: int, megabytes: list[float]) -> None:
    """Append samples of a process's memory until cancelled."""
    while True:
        megabytes.append(anonymous_mb(pid))
        await asyncio.sleep(SAMPLING_SECONDS)
