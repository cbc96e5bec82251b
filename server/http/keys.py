"""API keys: reads them, finds the owner of a key, requires a key for each request, and limits the rate of each key.

Only hashes of keys are stored. If no keys are configured, requests need no key, and all clients share a rate limit.
"""

import hmac
import math
import re
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import Message, Receive, Scope, Send

from server.errors import Rejected, invalid_key
from server.http.middleware import Check, HttpMiddleware, is_free, is_metrics, is_public, refuse
from server.settings import Settings, SettingsError, read_file

ENTRY = re.compile(r"(?:(?P<name>[A-Za-z0-9._-]{1,64}):\s*)?(?P<key>(?:(?![:#,])[!-~])+)")
COMMENT = re.compile(r"(?:^|\s)#.*")

WINDOW_SECONDS = 60


@dataclass(frozen=True)
class ApiKey:
    """A key's public id and its SHA-256. Keys with the same name share an id, so a new key can replace an old key."""

    id: str
    digest: bytes = field(repr=False)


def read_keys(settings: Settings) -> list[ApiKey]:
    """Read the keys in the settings and in the key file. A `SettingsError` names the entry, never the key."""
    entries = [(f"api_keys, entry {n}", key) for n, key in enumerate(settings.api_keys, start=1)]
    if settings.api_keys_file is not None:
        entries += lines_of(settings.api_keys_file)
    found: dict[bytes, tuple[str, ApiKey]] = {}
    for place, text in entries:
        key = parse_key(place, text)
        if key.digest in found:
            raise SettingsError(f"{place}: the same key as {found[key.digest][0]}")
        found[key.digest] = place, key
    return [key for _, key in found.values()]


def lines_of(file: Path) -> list[tuple[str, str]]:
    """Return the non-empty lines of the key file without comments, each with its place."""
    lines = [COMMENT.sub("", line).strip() for line in read_file("api_keys_file", file).splitlines()]
    if not any(lines):
        raise SettingsError(f"api_keys_file: {file} contains no keys")
    return [(f"api_keys_file, line {number}", line) for number, line in enumerate(lines, start=1) if line]


def parse_key(place: str, text: str) -> ApiKey:
    if not text:
        raise SettingsError(f"{place}: the key is empty")
    if not (entry := ENTRY.fullmatch(text)):
        raise SettingsError(f"{place}: must be KEY or NAME:KEY; keys may contain visible ASCII except ':', '#' and ','")
    digest = sha256(entry["key"].encode()).digest()
    return ApiKey(entry["name"] or digest.hex()[:8], digest)


def owner(keys: Sequence[ApiKey], presented: str) -> str | None:
    """Return the id of a key, or None if it is unknown. Compare with all keys, in constant time."""
    digest = sha256(presented.encode()).digest()
    matches = [hmac.compare_digest(key.digest, digest) for key in keys]
    return next((key.id for key, matched in zip(keys, matches, strict=True) if matched), None)


@dataclass
class KeyGate(Check):
    """Answers 401 to a request without a known key, before the body is read. Records the key's id.

    `metrics_open` makes /metrics public.
    """

    keys: Sequence[ApiKey]
    metrics_open: bool

    def check(self, scope: Scope, headers: Headers) -> None:
        if is_public(scope) or (self.metrics_open and is_metrics(scope)):
            return
        key_id = owner(self.keys, bearer(headers))
        if key_id is None:
            raise invalid_key("the key is unknown")
        scope["state"]["record"].key_id = key_id


def bearer(headers: Headers) -> str:
    """Return the key in the `authorization` or `x-api-key` header.

    Raise `Rejected` unless there is exactly one key. If there were two, a proxy could check one and this server the
    other.
    """
    values = [*headers.getlist("authorization"), *(f"Bearer {key}" for key in headers.getlist("x-api-key"))]
    scheme, _, key = values[0].partition(" ") if len(values) == 1 else ("", "", "")
    if scheme.lower() != "bearer" or not key.strip():
        raise invalid_key("a key is required")
    return key.strip()


@dataclass
class RateLimit(HttpMiddleware):
    """Answers 429 before the body is read. Refused requests and requests that cost nothing do not count.

    Stores the times of at most `requests_per_minute` requests per key. `clock` returns monotonic seconds.
    """

    requests_per_minute: int
    clock: Callable[[], float] = time.monotonic
    times: defaultdict[str, deque[float]] = field(default_factory=lambda: defaultdict(deque))

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if is_free(scope):
            await self.app(scope, receive, send)
            return
        now, times = self.clock(), self.times[scope["state"]["record"].key_id]
        while times and times[0] <= now - WINDOW_SECONDS:
            times.popleft()
        if is_accepted := len(times) < self.requests_per_minute:
            times.append(now)
        remaining = self.requests_per_minute - len(times)
        seconds = times[0] + WINDOW_SECONDS - now  # time until the oldest counted request leaves the window

        async def limited_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["x-ratelimit-limit-requests"] = str(self.requests_per_minute)
                headers["x-ratelimit-remaining-requests"] = str(remaining)
                headers["x-ratelimit-reset-requests"] = f"{seconds:.3f}s"
            await send(message)

        if is_accepted:
            await self.app(scope, receive, limited_send)
        else:
            retry = math.ceil(seconds)
            message = f"the rate limit of {self.requests_per_minute:,} per minute is exceeded; retry in {retry} s"
            error = Rejected("rate_limit_exceeded", message, retry_after_seconds=retry)
            await refuse(error, scope, receive, limited_send)
