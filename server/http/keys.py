"""API keys: where they come from, whose a key is, and the layer that lets nobody in without one.

What is kept of a key is its hash. Without any key the server is open.
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
class Key:
    """A key's id, which may be told, and its SHA-256. Keys of one name share an id, so that either can be replaced."""

    id: str
    digest: bytes = field(repr=False)


def read_keys(settings: Settings) -> list[Key]:
    """The keys of the settings and of their file. Raises `SettingsError`, which names the place and never the key."""
    entries = [(f"api_keys, entry {n}", key) for n, key in enumerate(settings.api_keys, start=1)]
    if settings.api_keys_file is not None:
        entries += lines_of(settings.api_keys_file)
    return without_duplicates((place, parsed(place, text)) for place, text in entries)


def lines_of(file: Path) -> list[tuple[str, str]]:
    """Each line that says something, with its place."""
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


def parsed(place: str, text: str) -> Key:
    if not text:
        raise SettingsError(f"{place}: the key is empty")
    if not (entry := ENTRY.fullmatch(text)):
        raise SettingsError(f"{place}: must be KEY or NAME:KEY, of visible ASCII characters without : # and ,")
    digest = sha256(entry["key"].encode()).digest()
    return Key(entry["name"] or digest.hex()[:8], digest)


def without_duplicates(keys: Iterable[tuple[str, Key]]) -> list[Key]:
    places: dict[bytes, str] = {}
    kept: list[Key] = []
    for place, key in keys:
        if key.digest in places:
            raise SettingsError(f"{place}: the same key as {places[key.digest]}")
        places[key.digest] = place
        kept.append(key)
    return kept


class KeyRing:
    """Keys that may be replaced by others while they are asked for."""

    def __init__(self, keys: Iterable[Key] = ()) -> None:
        self.replace(keys)

    def __len__(self) -> int:
        return len(self._keys)

    def replace(self, keys: Iterable[Key]) -> None:
        self._keys = list(keys)

    def owner(self, presented: str) -> str | None:
        """The id of a key, None if it is none of ours. Looks at all of them, however early it is found."""
        digest = sha256(presented.encode()).digest()
        matches = [hmac.compare_digest(key.digest, digest) for key in self._keys]
        return next((key.id for key, matched in zip(self._keys, matches, strict=True) if matched), None)


class ApiKeys:
    """Answers 401 before a body is read, whatever the path or method, unless it is public; else notes whose key it was.

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
            raise InvalidKey("the key is not known here")
        return key_id


def is_public(scope: Scope) -> bool:
    """The probes, and the page with its assets, may be read by anybody."""
    path: str = scope["path"]
    is_shown = path in PROBES or path == PAGE or path.startswith(ASSETS)
    return is_shown and scope["method"] in READING


def is_metrics(scope: Scope) -> bool:
    return scope["path"] == METRICS and scope["method"] in READING


def bearer(headers: Headers) -> str:
    """The key that a request shows. Raises `InvalidKey`; also for several, of which a proxy may have seen another."""
    shown = headers.getlist("authorization")
    scheme, _, key = shown[0].partition(" ") if len(shown) == 1 else ("", "", "")
    if scheme.lower() != "bearer" or not key.strip():
        raise InvalidKey("a key is needed")
    return key.strip()


def note_key(scope: Scope, key_id: str) -> None:
    scope["state"]["key_id"] = key_id
    if record := scope["state"]["record"]:
        record.key_id = key_id
