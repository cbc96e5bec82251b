"""Forwards requests to replicas and their responses to clients. Retries a request if its replica is lost.

A whole response is forwarded once it is complete. A stream is forwarded event by event. If a replica is lost after a
stream has begun, the stream ends with an error. Otherwise the request is retried.
"""

import asyncio
import hmac
import re
import socket
from collections.abc import AsyncIterator, Collection
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any

import aiohttp
import structlog
from pydantic_core import to_json
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send
from yarl import URL

from server.errors import ApiError, Rejected, invalid_key
from server.http.admission import Admission
from server.http.event_stream import DONE, framed, unless_disconnected
from server.http.keys import set_key
from server.http.middleware import Check
from server.replicas.pool import Address, NoReplica, Pool
from server.telemetry.metrics import Metrics
from server.telemetry.record import RequestRecord

MAX_ATTEMPTS = 5
"""Maximum number of attempts per request, including failed connections."""

MAX_DELIVERIES = 3
"""Maximum number of attempts that reach a replica. If three replicas fail, the request may be the cause."""

UNBOUNDED = 2**31
"""The gateway does not limit open requests, because replicas limit their own queues."""

RETRY_SECONDS = 5

WAIT_SECONDS = 30
"""How long a request waits for a replica."""

IDLE_SECONDS = 15
"""How long an idle connection to a replica stays open. Must be shorter than the replica's keep-alive."""

TARGET = re.compile(rb"/[!-~]*")
FORWARDED = ("accept", "content-type")
HOP_BY_HOP = (b"connection", b"date", b"keep-alive", b"server", b"transfer-encoding")
"""Response headers that are not forwarded, because the gateway's connection sets them itself."""

DEAD_PEER = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 25_000}
"""Socket options that close a connection if the peer does not respond for 25 seconds."""

END_OF_EVENT = b"\n\n"

STOPPED = b'"code": "engine_stopped"'
"""Text in the response of a replica whose engine has stopped."""

SECRET = "x-nvium-secret"  # noqa: S105 (a header's name)
KEY_ID = "x-nvium-key-id"

log = structlog.get_logger("nvium.server")


@dataclass
class GatewayOnly(Check):
    """Replaces `KeyGate` in a replica. Requires the gateway's secret and reads the key id that the gateway sends."""

    secret: str = field(repr=False)

    def check(self, scope: Scope, headers: Headers) -> None:
        if not hmac.compare_digest(headers.get(SECRET, "").encode(), self.secret.encode()):
            raise invalid_key("only the gateway may call a replica")
        set_key(scope, headers.get(KEY_ID, ""))


class Relay:
    """The ASGI app that forwards requests. `admission` counts open requests."""

    _session: aiohttp.ClientSession

    def __init__(self, pool: Pool, metrics: Metrics) -> None:
        self._pool = pool
        self._metrics = metrics
        self.admission = Admission(UNBOUNDED)
        self._releases: set[asyncio.Task[None]] = set()
        self._in_flight: set[asyncio.Timeout] = set()
        self._is_given_up = False

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """Open the connection pool. Requests can be forwarded while the context is open."""
        connector = aiohttp.TCPConnector(
            limit=0, keepalive_timeout=IDLE_SECONDS, use_dns_cache=False, socket_factory=new_socket
        )
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=WAIT_SECONDS)
        async with aiohttp.ClientSession(
            connector=connector, timeout=timeout, auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar()
        ) as self._session:
            yield
        await asyncio.gather(*self._releases, return_exceptions=True)

    async def get(self, address: Address, path: str) -> str:
        """Get a page from a replica. Raise `OSError` or `aiohttp.ClientError` if that fails."""
        async with self._session.get(URL(address.url + path), headers={SECRET: address.secret}) as answer:
            answer.raise_for_status()
            return await answer.text()

    def give_up(self) -> None:
        """Fail all open requests. Call this on the event loop."""
        self._is_given_up = True
        for timeout in self._in_flight:
            timeout.reschedule(0)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not TARGET.fullmatch(scope["raw_path"]):
            raise HTTPException(404)
        self.admission.enter(1)
        try:
            body: bytes = (await receive())["body"]  # `Bodies` sends the whole body in one message
            exchange = Exchange(scope, send, body)
            is_sent = await unless_disconnected(self._forward(exchange), receive)
            if is_sent is None:
                scope["state"]["record"].aborted("disconnected")
        finally:
            self.admission.leave()

    async def _forward(self, exchange: "Exchange") -> bool:
        lost, num_deliveries = set[str](), 0
        for _ in range(MAX_ATTEMPTS):
            try:
                async with self._chosen(lost) as address, self._until_given_up():
                    await exchange.forward(self._session, address)
                return True
            except (aiohttp.ClientError, OSError) as error:
                num_deliveries += not isinstance(error, aiohttp.ClientConnectorError)
                lost.add(address.name)
                exchange.record.is_passed_on = False
                log.warning("lost a replica", request_id=exchange.request_id, kind=type(error).__name__)
                if exchange.has_begun:
                    self._metrics.broken_streams.inc()
                    await exchange.break_off()
                    return True
                if self._is_given_up:
                    break
                if num_deliveries == MAX_DELIVERIES:
                    message = f"{MAX_DELIVERIES} replicas failed while they handled this request; it is not retried"
                    raise ApiError(message, status=500, code="replicas_lost") from error
                self._metrics.moved_requests.inc()
        raise no_replica()

    @asynccontextmanager
    async def _chosen(self, lost: Collection[str]) -> AsyncIterator[Address]:
        """Choose a replica, preferably one that is not in `lost`. After the response, release it in the background."""
        stack = AsyncExitStack()
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                address = await stack.enter_async_context(self._pool.chosen(lost))
        except (NoReplica, TimeoutError) as error:
            raise no_replica() from error
        try:
            yield address
        finally:
            release = asyncio.create_task(stack.aclose())
            self._releases.add(release)
            release.add_done_callback(self._releases.discard)

    @asynccontextmanager
    async def _until_given_up(self) -> AsyncIterator[None]:
        """Raise `TimeoutError` in the context when `give_up` is called."""
        async with asyncio.timeout(None) as timeout:
            self._in_flight.add(timeout)
            try:
                yield
            finally:
                self._in_flight.remove(timeout)


class Exchange:
    """One client's request and the response to it."""

    def __init__(self, scope: Scope, send: Send, body: bytes) -> None:
        self.body = body
        self.has_begun = False
        """Whether the response's head has been passed to `send`."""
        self.request_id: str = scope["state"]["request_id"]
        self.record: RequestRecord = scope["state"]["record"]
        self._method: str = scope["method"]
        query: bytes = scope["query_string"]
        self._target = (scope["raw_path"] + (b"?" + query if query else b"")).decode("latin-1")
        headers = Headers(scope=scope)
        self._headers = {name: headers[name] for name in FORWARDED if name in headers}
        self._headers |= {"x-request-id": self.request_id, KEY_ID: scope["state"]["key_id"]}
        self._send = send

    async def forward(self, session: aiohttp.ClientSession, address: Address) -> None:
        """Forward the request and the response. Raise `aiohttp.ClientError` or `OSError` if the replica is lost."""
        url = URL(address.url + self._target, encoded=True)
        self.record.is_passed_on = True
        async with session.request(
            self._method,
            url,
            headers={**self._headers, SECRET: address.secret},
            data=BytesIO(self.body) if self.body else None,
            allow_redirects=False,
        ) as response:
            await self._send_response(response)

    async def break_off(self) -> None:
        """End a stream with an error because its replica is lost."""
        error = ApiError("the replica failed while it was answering", status=503, code="replica_lost")
        self.record.refused(error)
        await self._send_events(framed([to_json(error.body), DONE]))
        await self._send({"type": "http.response.body", "body": b""})

    async def _send_response(self, response: aiohttp.ClientResponse) -> None:
        if response.content_type != "text/event-stream":
            body = await response.read()
            if response.status == 503 and STOPPED in body:
                raise ConnectionError("the engine of the replica has stopped")
            await self._begin(response)
            await self._send({"type": "http.response.body", "body": body})
            return
        unsent = b""
        async for piece in response.content.iter_any():
            events, end, unsent = (unsent + piece).rpartition(END_OF_EVENT)
            if end:
                if not self.has_begun:
                    await self._begin(response)
                await self._send_events(events + end)
        await self._send({"type": "http.response.body", "body": b""})

    async def _begin(self, response: aiohttp.ClientResponse) -> None:
        self.has_begun = True
        headers = [(name.lower(), value) for name, value in response.raw_headers if name.lower() not in HOP_BY_HOP]
        await self._send({"type": "http.response.start", "status": response.status, "headers": headers})

    async def _send_events(self, events: bytes) -> None:
        await self._send({"type": "http.response.body", "body": events, "more_body": True})


def no_replica() -> Rejected:
    return Rejected("no_replica", "no replica is available", retry_after_seconds=RETRY_SECONDS)


def new_socket(address: tuple[Any, ...]) -> socket.socket:
    """Create a socket to a replica. The socket detects that the machine is dead."""
    family, kind, protocol, *_ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, True)
    for name, value in DEAD_PEER.items():
        with suppress(AttributeError):  # some systems lack some of these options
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return made
