"""ASGI middleware for request ids, records, path prefixes, unexpected errors and content types."""

import asyncio
import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from structlog.contextvars import bound_contextvars

from server.admission import Drainable, Loading
from server.errors import ApiError, Rejected, engine_stopped, internal_error
from server.telemetry.metrics import Metrics
from server.telemetry.record import OTHER, RequestRecord

PROTECTIVE = {
    "cache-control": "no-store",
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
"""Security headers for browsers. A route's own headers take precedence."""

CLOSE = {"connection": "close"}

PROBES = ("/livez", "/readyz", "/health")
PAGE = "/"
READING = ("GET", "HEAD")

log = structlog.get_logger("nvium.server")


def is_public(scope: Scope) -> bool:
    is_page = (scope["path"] == PAGE or scope["path"].startswith("/assets/")) and scope["method"] in READING
    return is_page or is_probe(scope)


def is_probe(scope: Scope) -> bool:
    return scope["path"] in PROBES and scope["method"] in READING


def is_metrics(scope: Scope) -> bool:
    return scope["path"] == "/metrics" and scope["method"] in READING


def is_free(scope: Scope) -> bool:
    is_model = scope["path"].startswith("/v1/models") and scope["method"] in READING
    return is_model or is_public(scope) or is_metrics(scope)


@dataclass
class HttpMiddleware(ABC):
    """A middleware for HTTP requests. Passes other scopes, such as `lifespan`, to the app unchanged."""

    app: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        handle = self.handle if scope["type"] == "http" else self.app
        await handle(scope, receive, send)

    @abstractmethod
    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None: ...


@dataclass
class RequestContext(HttpMiddleware):
    """The outermost middleware. Gives each request an id and a record, and each response security headers.

    `endpoints` maps the paths of POST requests to their names in records. `root_path` is removed from paths, unless a
    proxy has already removed it.
    """

    metrics: Metrics
    endpoints: Mapping[str, str]
    root_path: str = ""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        app, prefix = self.app, self.root_path
        if prefix and scope["path"] == prefix:
            app = RedirectResponse(f"{prefix}/", 308)
        elif prefix and scope["path"].startswith(f"{prefix}/"):
            scope = {**scope, **{name: scope[name][len(prefix) :] for name in ("path", "raw_path")}}
        headers = Headers(scope=scope)
        request_id = headers.get("x-request-id", "")
        if not re.fullmatch(r"[A-Za-z0-9._-]{1,128}", request_id):
            request_id = uuid.uuid4().hex
        record = scope.setdefault("state", {})["record"] = RequestRecord(self.metrics, request_id=request_id)
        record.endpoint = self.endpoints.get(scope["path"], OTHER) if scope["method"] == "POST" else OTHER
        record.target = f"{scope['method']} {scope['path']}" if record.endpoint == OTHER else None

        async def framed_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                sent = MutableHeaders(scope=message)
                sent["x-request-id"] = record.request_id
                for name, value in PROTECTIVE.items():
                    sent.setdefault(name, value)
                record.status = message["status"]
            await send(message)

        with bound_contextvars(request_id=record.request_id):
            try:
                await app(scope, receive, framed_send)
            finally:
                record.close(is_routine=is_free(scope) and record.outcome == "completed")


class LastResort(HttpMiddleware):
    """Answers 500 to an unhandled exception, and 503 if the server stops before the response."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        record: RequestRecord = scope["state"]["record"]
        try:
            await self.app(scope, receive, send)
        except asyncio.CancelledError:
            if not scope["app"].state.service.admission.is_draining:
                record.aborted("disconnected")  # another server, such as Ray's, may cancel it
                return
            error: ApiError = engine_stopped()
        except Exception:
            log.exception("a request failed")
            error = internal_error()
        else:
            return
        record.refused(error)
        if record.status is None:  # the response has not begun
            await error.response()(scope, receive, send)


class Check(HttpMiddleware):
    """A middleware that refuses a request if `check` raises `ApiError`."""

    @abstractmethod
    def check(self, scope: Scope, headers: MutableHeaders) -> None: ...

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self.check(scope, MutableHeaders(scope=scope))
        except ApiError as error:
            await refuse(error, scope, receive, send)
            return
        await self.app(scope, receive, send)


class WhileServing(Check):
    """Refuses requests while the app's service is `Loading`, except liveness probes, and while the server drains."""

    def check(self, scope: Scope, headers: MutableHeaders) -> None:
        service: Drainable = scope["app"].state.service
        if isinstance(service, Loading) and scope["path"] != "/livez":
            raise Rejected("not_ready", "the model is loading", retry_after_seconds=2)
        if not (is_public(scope) or is_metrics(scope)):
            service.admission.check_open()


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
        given = headers.get("content-type", "").partition(";")[0].strip().lower()
        if scope["method"] != "POST" or self.JSON.fullmatch(given):
            return
        if given not in self.TAKEN_FOR_JSON:
            raise Rejected("unsupported_body", f"content-type: {given[:50]!r} is not supported, send application/json")
        if any(name in headers for name in self.SENT_BY_BROWSERS):
            raise Rejected("unsupported_body", "content-type: browsers must send application/json")
        headers["content-type"] = "application/json"


class AsGet(HttpMiddleware):
    """Handles HEAD as GET. uvicorn omits the body of a response to HEAD."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.app({**scope, "method": "GET"} if scope["method"] == "HEAD" else scope, receive, send)


async def refuse(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    scope["state"]["record"].refused(error)
    await error.response()(scope, receive, send)
