"""Who may send requests: origins, API keys, and the rate limit of each key.

If no keys are configured, requests need no key, all clients share a rate limit, and a check of origins protects the
server from pages of other sites. Only hashes of keys are stored.
"""

import hmac
import math
import re
import socket
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.errors import ApiError, Rejected
from server.http.middleware import PAGE, Check, HttpMiddleware, is_free, is_metrics, is_probe, is_public, refuse
from server.settings import Settings, SettingsError, read_file

ANY = "*"

EXPOSED = (
    "retry-after",
    "x-nvium-ignored-params",
    "x-ratelimit-limit-requests",
    "x-ratelimit-remaining-requests",
    "x-ratelimit-reset-requests",
    "x-request-id",
)
"""Response headers that a page of an allowed origin may read."""

ENTRY = re.compile(r"(?:(?P<name>[A-Za-z0-9._-]{1,64}):\s*)?(?P<key>(?:(?![:#,])[!-~])+)")

COMMENT = re.compile(r"(?:^|\s)#.*")

WINDOW_SECONDS = 60


class OriginCheck(Check):
    """Answers 403 if `Host` does not name this server, or if the request comes from a page that CORS does not allow.

    Checking `Host` prevents DNS rebinding. A link to the playground is allowed on any page.
    """

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        super().__init__(app)
        self._origins = settings.cors_origins
        own = socket.gethostname().lower()
        names = {"localhost", own, own.partition(".")[0], settings.host, *settings.allowed_hosts}
        self._names = names | {f"{own.partition('.')[0]}.local"}
        self._domains = (".localhost", *(name[1:] for name in settings.allowed_hosts if name.startswith("*.")))
        self._checks_host = ANY not in settings.allowed_hosts

    def check(self, scope: Scope, headers: Headers) -> None:
        if is_probe(scope):  # it changes nothing, and load balancers send any `Host`
            return
        host, origin = headers.get("host", ""), headers.get("origin")
        name = name_of(host)
        is_own = name in self._names or name.endswith(self._domains) or is_own_address(name, scope)
        if host and self._checks_host and not is_own:
            raise Rejected("host_not_allowed", f"host {host[:100]!r} is not allowed; --allowed-hosts adds hosts")
        if ANY in self._origins or origin in self._origins:
            return
        is_foreign = origin is not None and origin.lower().partition("://")[2] != host.lower()
        opens_page = scope["method"] == "GET" and scope["path"] == PAGE and headers.get("sec-fetch-mode") == "navigate"
        is_cross_site = headers.get("sec-fetch-site") == "cross-site" and not opens_page
        if is_foreign or is_cross_site:
            message = f"origin {(origin or 'another site')[:100]!r} is not allowed; --cors-origins adds origins"
            raise Rejected("origin_not_allowed", message)


def name_of(host: str) -> str:
    """Return the name or address in a `Host` header, without the port. If the header is malformed, return ""."""
    try:
        return (urlsplit(f"//{host}").hostname or "").removesuffix(".")
    except ValueError:
        return ""


def is_own_address(name: str, scope: Scope) -> bool:
    """Return whether the name is a loopback address or the address that the client connected to."""
    try:
        address = ip_address(name)
    except ValueError:
        return False
    server = scope.get("server")
    return address.is_loopback or address.is_unspecified or (server is not None and name == server[0])


class Cors(CORSMiddleware):
    """Starlette's middleware. Allows no cookies."""

    def preflight_response(self, request_headers: Headers) -> Response:
        """Return Starlette's response, or an error in the API's form if Starlette refuses."""
        response = super().preflight_response(request_headers)
        if response.status_code < 400:
            return response
        refusal = ApiError(bytes(response.body).decode()).response()
        refusal.headers["vary"] = response.headers["vary"]
        return refusal


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
        # exactly one key: of two keys, a proxy could check one and this server the other
        values = [*headers.getlist("authorization"), *(f"Bearer {key}" for key in headers.getlist("x-api-key"))]
        scheme, _, key = values[0].partition(" ") if len(values) == 1 else ("", "", "")
        is_given = scheme.lower() == "bearer" and key.strip() != ""
        key_id = owner(self.keys, key.strip()) if is_given else None
        if key_id is None:
            what = "the key is unknown" if is_given else "a key is required"
            message = f"{what}; send an API key as `Authorization: Bearer KEY` or `x-api-key: KEY`"
            raise Rejected("invalid_api_key", message, headers={"www-authenticate": "Bearer"})
        scope["state"]["record"].key_id = key_id


@dataclass
class RateLimit(HttpMiddleware):
    """Limits each key's requests in any 60 seconds, and sends OpenAI's headers. Answers 429 before the body is read.

    Without keys, all clients share a limit. Refused requests and requests that cost nothing do not count.

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
