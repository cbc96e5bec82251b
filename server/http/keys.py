"""API keys: reading them, finding a key's owner, and the layer that requires one.

Only hashes of keys are kept. Without keys the server is open.
"""

import hmac
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from server.errors import InvalidKey
from server.http.middleware import refuse
from server.settings import Settings, SettingsError
from server.telemetry.metrics import Metrics

ENTRY = re.compile(r"(?:(?P<name>[A-Za-z0-9._-]{1,64}):\s*)?(?P<key>(?:(?![:#,])[!-~])+)")
COMMENT = re.compile(r"(?:^|\s)#.*")

PROBES = ("/livez", "/readyz", "/health")
METRICS = "/metrics"
PAGE = "/"
ASSETS = "/assets/"
READING = ("GET", "HEAD")


@dataclass(frozen=True)
class ApiKey:
    """A key's public id and its SHA-256. Keys of the same name share an id, so that one can replace the other."""

    id: str
    digest: bytes = field(repr=False)


def read_keys(settings: Settings) -> list[ApiKey]:
    """The keys in the settings and in their file. Raises `SettingsError` naming the place, never the key."""
    entries = [(f"api_keys, entry {n}", key) for n, key in enumerate(settings.api_keys, start=1)]
    if settings.api_keys_file is not None:
        entries += lines_of(settings.api_keys_file)
    return without_duplicates((place, parsed(place, text)) for place, text in entries)


def lines_of(file: Path) -> list[tuple[str, str]]:
    """Each line that is not empty, with its place."""
    lines = [COMMENT.sub("", line).strip() for line in contents(file).splitlines()]
    if not any(lines):
        raise SettingsError(f"api_keys_file: {file} holds no keys")
    return [(f"api_keys_file, line {number}", line) for number, line in enumerate(lines, start=1) if line]


def contents(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise SettingsError(f"api_keys_file: cannot read {file}: {error.strerror}") from error
    except UnicodeDecodeError:
        raise SettingsError(f"api_keys_file: {file} is not UTF-8 text") from None


def parsed(place: str, text: str) -> ApiKey:
    if not text:
        raise SettingsError(f"{place}: the key is empty")
    if not (entry := ENTRY.fullmatch(text)):
        raise SettingsError(f"{place}: must be KEY or NAME:KEY, of visible ASCII characters without : # and ,")
    digest = sha256(entry["key"].encode()).digest()
    return ApiKey(entry["name"] or digest.hex()[:8], digest)


def without_duplicates(keys: Iterable[tuple[str, ApiKey]]) -> list[ApiKey]:
    places: dict[bytes, str] = {}
    kept: list[ApiKey] = []
    for place, key in keys:
        if key.digest in places:
            raise SettingsError(f"{place}: the same key as {places[key.digest]}")
        places[key.digest] = place
        kept.append(key)
    return kept


class KeyRing:
    """Keys, replaceable while the server runs."""

    def __init__(self, keys: Iterable[ApiKey] = ()) -> None:
        self.replace(keys)

    def __len__(self) -> int:
        return len(self._keys)

    def replace(self, keys: Iterable[ApiKey]) -> None:
        self._keys = list(keys)

    def owner(self, presented: str) -> str | None:
        """The id of a key; None if it is unknown. Always compares with all keys, in constant time."""
        digest = sha256(presented.encode()).digest()
        matches = [hmac.compare_digest(key.digest, digest) for key in self._keys]
        return next((key.id for key, matched in zip(self._keys, matches, strict=True) if matched), None)


class KeyGate:
    """Answers 401 to non-public requests without a known key, before reading the body; else records the key's id.

    `metrics_open`: /metrics is public too.
    """

    def __init__(self, app: ASGIApp, keys: KeyRing, metrics: Metrics, metrics_open: bool) -> None:
        self._app = app
        self._keys = keys
        self._metrics = metrics
        self._metrics_open = metrics_open

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._is_open(scope):
            try:
                note_key(scope, self._owner(Headers(scope=scope)))
            except InvalidKey as error:
                await refuse(error, self._metrics, scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _is_open(self, scope: Scope) -> bool:
        return is_public(scope) or (self._metrics_open and is_metrics(scope))

    def _owner(self, headers: Headers) -> str:
        key_id = self._keys.owner(bearer(headers))
        if key_id is None:
            raise InvalidKey("the key is unknown")
        return key_id


def is_public(scope: Scope) -> bool:
    """Whether this is a probe, or the page or its assets."""
    path: str = scope["path"]
    is_shown = path in PROBES or path == PAGE or path.startswith(ASSETS)
    return is_shown and scope["method"] in READING


def is_metrics(scope: Scope) -> bool:
    return scope["path"] == METRICS and scope["method"] in READING


def bearer(headers: Headers) -> str:
    """The key of a request, in the header of OpenAI's clients or of Anthropic's.

    Raises `InvalidKey`, also for several headers: a proxy may have checked another one.
    """
    shown = [*headers.getlist("authorization"), *(f"Bearer {key}" for key in headers.getlist("x-api-key"))]
    scheme, _, key = shown[0].partition(" ") if len(shown) == 1 else ("", "", "")
    if scheme.lower() != "bearer" or not key.strip():
        raise InvalidKey("a key is required")
    return key.strip()


def note_key(scope: Scope, key_id: str) -> None:
    scope["state"]["key_id"] = key_id
    if record := scope["state"]["record"]:
        record.key_id = key_id
