"""ASGI middleware for request ids, records, unexpected errors, content types and path prefixes."""

import asyncio
import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from structlog.contextvars import bound_contextvars

from server.errors import ApiError, Rejected, engine_stopped, internal_error
from server.http.protection import protect
from server.telemetry.metrics import Metrics
from server.telemetry.record import RequestRecord
from server.telemetry.tracing import Tracing

SAFE_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")

log = structlog.get_logger("nvium.server")


class HttpMiddleware(ABC):
    """A middleware for HTTP requests. Passes other scopes, such as `lifespan`, to the app unchanged."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        handle = self.handle if scope["type"] == "http" else self._app
        await handle(scope, receive, send)

    @abstractmethod
    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None: ...


class RequestContext(HttpMiddleware):
    """The outermost middleware. Gives each request an id, and each response security headers.

    `endpoints` maps paths to names. POST requests to these paths are recorded.
    """

    def __init__(
        self, app: ASGIApp, metrics: Metrics, endpoints: Mapping[str, str], tracing: Tracing | None = None
    ) -> None:
        super().__init__(app)
        self._metrics = metrics
        self._endpoints = endpoints
        self._tracing = tracing

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        request_id = headers.get("x-request-id", "")
        if not SAFE_REQUEST_ID.fullmatch(request_id):
            request_id = uuid.uuid4().hex
        record = self._open(scope, request_id)
        scope.setdefault("state", {}).update(request_id=request_id, key_id="", record=record)

        async def framed_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                sent = MutableHeaders(scope=message)
                sent["x-request-id"] = request_id
                protect(sent)
                if record:
                    record.status = message["status"]
            await send(message)

        with bound_contextvars(request_id=request_id):
            try:
                await self._app(scope, receive, framed_send)
            finally:
                if record:
                    record.close()
                    if self._tracing:
                        self._tracing.trace(record, headers)

    def _open(self, scope: Scope, request_id: str) -> RequestRecord | None:
        endpoint = self._endpoints.get(scope["path"]) if scope["method"] == "POST" else None
        if endpoint is None:
            return None
        received_at = scope.get("state", {}).get("received_at")
        return RequestRecord(self._metrics, request_id=request_id, endpoint=endpoint, received_at=received_at)


class LastResort(HttpMiddleware):
    """Answers 500 to an unhandled exception, and 503 if the server stops before the response."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_started = False

        async def noted_send(message: Message) -> None:
            nonlocal has_started
            has_started = True
            await send(message)

        try:
            await self._app(scope, receive, noted_send)
        except (Exception, asyncio.CancelledError) as cause:
            is_stopping = isinstance(cause, asyncio.CancelledError)
            if not is_stopping:
                log.exception("a request failed")
            error = engine_stopped() if is_stopping else internal_error()
            if record := scope["state"]["record"]:
                record.refused(error)
            if not has_started:
                await error.response()(scope, receive, send)


class Check(HttpMiddleware):
    """A middleware that refuses a request if `check` raises `ApiError`."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        super().__init__(app)
        self._metrics = metrics

    @abstractmethod
    def check(self, scope: Scope, headers: MutableHeaders) -> None: ...

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self.check(scope, MutableHeaders(scope=scope))
        except ApiError as error:
            await refuse(error, self._metrics, scope, receive, send)
            return
        await self._app(scope, receive, send)


class JsonBodies(Check):
    """Treats a body as JSON if it has no content type or the default type of `curl -d`. Answers 415 to other types.

    Also answers 415 to an encoded body, and to a browser's request that an HTML form could have sent, because any site
    can have a form that sends requests to this server.
    """

    JSON = re.compile(r"application/([^/]*\+)?json")
    TAKEN_FOR_JSON = ("", "application/x-www-form-urlencoded")
    SENT_BY_BROWSERS = ("origin", "sec-fetch-site", "sec-fetch-mode", "sec-fetch-dest")

    def check(self, scope: Scope, headers: MutableHeaders) -> None:
        encoding = headers.get("content-encoding", "").strip().lower()
        if encoding not in ("", "identity"):
            message = f"content-encoding: {encoding[:50]!r} is not supported, send the body unencoded"
            raise Rejected("unsupported_body", message)
        given = media_type(headers)
        if scope["method"] != "POST" or self.JSON.fullmatch(given):
            return
        if given not in self.TAKEN_FOR_JSON:
            raise Rejected("unsupported_body", f"content-type: {given[:50]!r} is not supported, send application/json")
        if any(name in headers for name in self.SENT_BY_BROWSERS):
            raise Rejected("unsupported_body", "content-type: browsers must send application/json")
        headers["content-type"] = "application/json"


class HeadAsGet(HttpMiddleware):
    """Handles HEAD as GET. uvicorn omits the body."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app({**scope, "method": "GET"} if scope["method"] == "HEAD" else scope, receive, send)


class RootPath(HttpMiddleware):
    """Removes `--root-path` from paths, unless a proxy has already removed it."""

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        super().__init__(app)
        self._prefix = prefix

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"].startswith(f"{self._prefix}/"):
            path = scope["path"].removeprefix(self._prefix)
            scope = {**scope, "path": path, "raw_path": scope["raw_path"].removeprefix(self._prefix.encode())}
        await self._app(scope, receive, send)


def media_type(headers: Headers) -> str:
    return headers.get("content-type", "").partition(";")[0].strip().lower()


async def refuse(error: ApiError, metrics: Metrics, scope: Scope, receive: Receive, send: Send) -> None:
    """Send a middleware's error as the response, and count it."""
    if record := scope["state"]["record"]:
        record.refused(error)
    else:
        metrics.rejected.labels(error.code).inc()
    await error.response()(scope, receive, send)
