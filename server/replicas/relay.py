"""Passes requests to replicas and their answers back; a request without an answer yet is retried at another replica.

A response is passed on once it is complete, a stream event by event, so only a stream whose replica is lost after its
first event ends with an error. Knows framing, and of a request's meaning only the prefixes of its prompt.
"""

import asyncio
import hmac
import re
import socket
from collections.abc import AsyncIterator, Collection
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from io import BytesIO
from typing import Any

import aiohttp
import structlog
from pydantic_core import to_json
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send
from yarl import URL

from server.errors import ApiError, InvalidKey, Overloaded
from server.http.admission import Admission
from server.http.connection import FAST_PATH, FastPath
from server.http.disconnect import unless_disconnected
from server.http.event_stream import DONE, framed
from server.http.keys import note_key
from server.http.middleware import refuse
from server.replicas.routing import Address, NoReplica, Pool, beginnings
from server.telemetry.metrics import Metrics
from server.telemetry.record import RequestRecord

MAX_ATTEMPTS = 5
"""Attempts to reach a replica."""

MAX_DELIVERIES = 3
"""Deliveries of one request: if three replicas die with it, it may be the cause."""

ANY_NUMBER = 2**31
"""No bound on open requests: replicas bound their own queues."""

RETRY_SECONDS = 5

PATIENCE_SECONDS = 30
"""How long a request waits for a replica to exist."""

IDLE_SECONDS = 15
"""How long an unused connection is kept: less than a replica keeps it."""

TARGET = re.compile(rb"/[!-~]*")
PASSED_ON = ("accept", "content-type", "traceparent", "tracestate")
OWN = (b"connection", b"date", b"keep-alive", b"server", b"transfer-encoding")
"""Headers that this server's connection sets itself."""

DEAD_PEER = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 25_000}
"""Connections to a machine that is gone are given up after 25 seconds."""

END_OF_EVENT = b"\n\n"

STOPPED = b'"code": "engine_stopped"'
"""Appears in the answer of a replica whose engine has stopped."""

SECRET = "x-nvium-secret"  # noqa: S105 (a header's name)
KEY_ID = "x-nvium-key-id"

log = structlog.get_logger("nvium.server")


class GatewayOnly:
    """Replaces the layer for keys: the gateway has checked the key and passes on its id."""

    def __init__(self, app: ASGIApp, secret: str, metrics: Metrics) -> None:
        self._app = app
        self._secret = secret
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            if not hmac.compare_digest(headers.get(SECRET, "").encode(), self._secret.encode()):
                await refuse(InvalidKey("this is not the server's gateway"), self._metrics, scope, receive, send)
                return
            note_key(scope, headers.get(KEY_ID, ""))
        await self._app(scope, receive, send)


class ReplicaLost(ApiError):
    status = 503
    type = "server_error"
    code = "replica_lost"

    def __init__(self) -> None:
        super().__init__("the replica that answered was lost")


class ReplicasLost(ApiError):
    status = 500
    type = "server_error"
    code = "replicas_lost"

    def __init__(self) -> None:
        super().__init__(f"{MAX_DELIVERIES} replicas were lost with this request, which is not retried")


class ReplicaFailed(OSError):
    """The replica reports that its engine has stopped."""


class Relay:
    """`admission` counts open requests."""

    def __init__(self, pool: Pool, metrics: Metrics, *, patience_seconds: float = PATIENCE_SECONDS) -> None:
        self._pool = pool
        self._metrics = metrics
        self._patience_seconds = patience_seconds
        self._session: aiohttp.ClientSession | None = None
        self.admission = Admission(ANY_NUMBER)
        self._released: set[asyncio.Task[None]] = set()
        self._passing: set[asyncio.Timeout] = set()
        self._is_given_up = False

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """A context in which requests can be forwarded."""
        connector = aiohttp.TCPConnector(
            limit=0, keepalive_timeout=IDLE_SECONDS, use_dns_cache=False, socket_factory=new_socket
        )
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self._patience_seconds)
        async with aiohttp.ClientSession(
            connector=connector, timeout=timeout, auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar()
        ) as self._session:
            yield
        await asyncio.gather(*self._released, return_exceptions=True)

    async def get(self, address: Address, path: str) -> str:
        """A replica's page. Raises `OSError` or `aiohttp.ClientError`."""
        async with self._connected().get(URL(address.url + path), headers={SECRET: address.secret}) as answer:
            answer.raise_for_status()
            return await answer.text()

    def give_up(self) -> None:
        """End open requests with an error. Called on the event loop."""
        self._is_given_up = True
        for passing in self._passing:
            passing.reschedule(0)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not TARGET.fullmatch(scope["raw_path"]):
            raise HTTPException(404)
        self.admission.enter(1)
        try:
            body: bytes = (await receive())["body"]  # whole, as `Bodies` gives it
            passage = Passage(scope, send, body)
            if await unless_disconnected(self._pass(passage), receive) is None:
                passage.abort()
        finally:
            self.admission.leave()

    async def _pass(self, passage: "Passage") -> bool:
        opening, lost, num_deliveries = beginnings(passage.body), set[str](), 0
        for _ in range(MAX_ATTEMPTS):
            try:
                async with self._at_some(opening, lost) as address, self._until_given_up():
                    await passage.take(self._connected(), address)
                return True
            except (aiohttp.ClientError, OSError) as error:
                num_deliveries += not isinstance(error, aiohttp.ClientConnectorError)
                lost.add(address.name)
                passage.note(is_passed_on=False)
                log.warning("lost a replica", request_id=passage.request_id, kind=type(error).__name__)
                if passage.has_begun:
                    self._metrics.broken_streams.inc()
                    await passage.break_off()
                    return True
                if self._is_given_up:
                    break
                if num_deliveries == MAX_DELIVERIES:
                    raise ReplicasLost from error
                self._metrics.moved_requests.inc()
        raise no_replica()

    @asynccontextmanager
    async def _at_some(self, opening: list[bytes], lost: Collection[str]) -> AsyncIterator[Address]:
        """A chosen replica, none that was lost if there are others; released in the background after the answer."""
        stack = AsyncExitStack()
        try:
            async with asyncio.timeout(self._patience_seconds):
                address = await stack.enter_async_context(self._pool.chosen(opening, lost))
        except (NoReplica, TimeoutError) as error:
            raise no_replica() from error
        try:
            yield address
        finally:
            leaving = asyncio.create_task(stack.aclose())
            self._released.add(leaving)
            leaving.add_done_callback(self._released.discard)

    @asynccontextmanager
    async def _until_given_up(self) -> AsyncIterator[None]:
        """Raises `TimeoutError`."""
        async with asyncio.timeout(None) as passing:
            self._passing.add(passing)
            try:
                yield
            finally:
                self._passing.remove(passing)

    def _connected(self) -> aiohttp.ClientSession:
        assert self._session
        return self._session


class Passage:
    """One request to a replica, and its answer back to the client."""

    def __init__(self, scope: Scope, send: Send, body: bytes) -> None:
        self.body = body
        self.has_begun = False
        self.request_id: str = scope["state"]["request_id"]
        self._record: RequestRecord | None = scope["state"]["record"]
        self._method: str = scope["method"]
        query: bytes = scope["query_string"]
        self._target = (scope["raw_path"] + (b"?" + query if query else b"")).decode("latin-1")
        headers = Headers(scope=scope)
        self._headers = {name: headers[name] for name in PASSED_ON if name in headers}
        self._headers |= {"x-request-id": self.request_id, KEY_ID: scope["state"]["key_id"]}
        self._fast_path: FastPath | None = scope.get("extensions", {}).get(FAST_PATH)
        self._send = send

    async def take(self, session: aiohttp.ClientSession, address: Address) -> None:
        """Pass the request on and its answer back. Raises `aiohttp.ClientError` or `OSError` if the replica is lost."""
        url = URL(address.url + self._target, encoded=True)
        self.note(is_passed_on=True)
        async with session.request(
            self._method,
            url,
            headers={**self._headers, SECRET: address.secret},
            data=BytesIO(self.body) if self.body else None,
            allow_redirects=False,
        ) as answer:
            await self._give(answer)

    def abort(self) -> None:
        """The client has disconnected."""
        if self._record:
            self._record.aborted("disconnected")

    async def break_off(self) -> None:
        """End a stream whose replica is lost."""
        error = ReplicaLost()
        if self._record:
            self._record.refused(error)
        await self._add(framed([to_json(error.body), DONE]))
        await self._end()

    async def _give(self, answer: aiohttp.ClientResponse) -> None:
        if answer.content_type != "text/event-stream":
            body = await answer.read()
            if answer.status == ReplicaLost.status and STOPPED in body:
                raise ReplicaFailed
            await self._begin(answer)
            await self._send({"type": "http.response.body", "body": body})
            return
        unsent = b""
        async for piece in answer.content.iter_any():
            whole, end, unsent = (unsent + piece).rpartition(END_OF_EVENT)
            if end:
                if not self.has_begun:
                    await self._begin(answer)
                await self._add(whole + end)
        await self._end()

    async def _begin(self, answer: aiohttp.ClientResponse) -> None:
        self.has_begun = True
        headers = [(name.lower(), value) for name, value in answer.raw_headers if name.lower() not in OWN]
        await self._send({"type": "http.response.start", "status": answer.status, "headers": headers})

    async def _add(self, piece: bytes) -> None:
        if self._fast_path and self._fast_path.is_open and self._is_flowing:
            self._fast_path.write(piece)
        else:
            await self._send({"type": "http.response.body", "body": piece, "more_body": True})
            self._is_flowing = True

    _is_flowing = False
    """The head has been sent, which happens with the first piece, so the fast path may be taken."""

    async def _end(self) -> None:
        await self._send({"type": "http.response.body", "body": b""})

    def note(self, *, is_passed_on: bool) -> None:
        """Set whether the replica, instead of the gateway, records the request."""
        if self._record:
            self._record.is_passed_on = is_passed_on


def no_replica() -> Overloaded:
    return Overloaded("no replica can answer", code="no_replica", retry_after_seconds=RETRY_SECONDS)


def new_socket(address: tuple[Any, ...]) -> socket.socket:
    """A socket to a replica: sends small pieces at once and detects a dead machine."""
    family, kind, protocol, *_ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, True)
    for name, value in DEAD_PEER.items():
        with suppress(AttributeError):  # some systems lack some of them
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return made
