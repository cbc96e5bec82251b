"""The errors of the HTTP API. Every response other than 2xx has the body of `ApiError.body`."""

import json
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from nvium_core import (
    ConstraintLimit,
    ContextLengthExceeded,
    EngineError,
    EngineStopped,
    InvalidRequest,
    NoTokenAllowed,
)
from nvium_core.errors import plain
from nvium_core.text.chat_template import ConversationError
from server.schemas.aliases import ALIASES

MAX_MESSAGE_CHARACTERS = 1000
"""Longer messages are truncated: they may quote the request."""

log = structlog.get_logger("nvium.server")

RETRY_STOPPED_SECONDS = 5

CONTEXT_EXCEEDED = "context_length_exceeded"

WRONG_FIELD = "wrong_field:"
"""Prefix of a pydantic error type. The name of the field at fault follows it."""


class ApiError(Exception):
    """An error sent to the client."""

    status = 400
    type = "invalid_request_error"
    code: str | None = None
    headers: Mapping[str, str] = {}

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message[:MAX_MESSAGE_CHARACTERS]
        self.param = param
        self.code = code or self.code

    @property
    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        return Response(json.dumps(self.body), self.status, self.headers, "application/json")


class InvalidField(ApiError):
    """The message starts with the field's name, except for an exceeded context: clients match OpenAI's wording."""

    def __init__(self, param: str, message: str, *, code: str | None = None) -> None:
        text = message if code == CONTEXT_EXCEEDED else f"{param}: {message}"
        super().__init__(text, param=param, code=code)


class MalformedRequest(ApiError):
    code = "malformed_request"


class RequestTimeout(ApiError):
    status = 408
    code = "request_timeout"

    def __init__(self, seconds: float) -> None:
        super().__init__(f"the server did not receive the whole request within {seconds:g} seconds")


class InvalidKey(ApiError):
    status = 401
    code = "invalid_api_key"
    headers = {"www-authenticate": "Bearer"}

    def __init__(self, message: str) -> None:
        super().__init__(f"{message}; send an API key as `Authorization: Bearer KEY` or `x-api-key: KEY`")


class HostNotAllowed(ApiError):
    status = 403
    code = "host_not_allowed"

    def __init__(self, host: str) -> None:
        super().__init__(f"host {host[:100]!r} is not allowed; --allowed-hosts adds hosts")


class OriginNotAllowed(ApiError):
    status = 403
    code = "origin_not_allowed"

    def __init__(self, origin: str) -> None:
        super().__init__(f"origin {origin[:100]!r} is not allowed; --cors-origins adds origins")


class UnsupportedBody(ApiError):
    status = 415
    code = "unsupported_body"


class TooComplex(ApiError):
    code = "too_costly"


class Unsatisfiable(ApiError):
    code = "no_token_allowed"


class ModelNotFound(ApiError):
    status = 404
    code = "model_not_found"

    def __init__(self, asked: str, served: Sequence[str]) -> None:
        names = ", ".join(map(repr, served))
        super().__init__(f"the model {asked!r} does not exist; available: {names}", param="model")


class BodyTooLarge(ApiError):
    status = 413
    code = "body_too_large"
    headers = {"connection": "close"}

    def __init__(self, max_bytes: int) -> None:
        super().__init__(f"the request body exceeds {max_bytes} bytes")


class HeadTooLarge(ApiError):
    status = 431
    code = "head_too_large"

    def __init__(self, max_bytes: int, max_lines: int) -> None:
        super().__init__(f"the request head exceeds {max_bytes} bytes or {max_lines} lines")


class RateLimited(ApiError):
    status = 429
    type = "requests"
    code = "rate_limit_exceeded"

    def __init__(self, requests_per_minute: int, retry_after_seconds: int) -> None:
        message = f"rate limit of {requests_per_minute} requests per minute exceeded; retry in {retry_after_seconds} s"
        super().__init__(message)
        self.headers = {"retry-after": str(retry_after_seconds)}


class Overloaded(ApiError):
    status = 503
    type = "server_error"

    def __init__(self, message: str, *, code: str, retry_after_seconds: int) -> None:
        super().__init__(message, code=code)
        self.headers = {"retry-after": str(retry_after_seconds)}


class BodiesTooLarge(Overloaded):
    def __init__(self, max_bytes: int) -> None:
        message = f"bodies of in-flight requests fill the limit of {max_bytes} bytes, or this key's share; retry later"
        super().__init__(message, code="bodies_too_large", retry_after_seconds=1)
        self.headers = {**self.headers, "connection": "close"}


class TooManyConnections(Overloaded):
    def __init__(self, max_connections: int) -> None:
        message = f"the limit of {max_connections} connections is reached"
        super().__init__(message, code="too_many_connections", retry_after_seconds=1)


class EngineGone(Overloaded):
    def __init__(self) -> None:
        super().__init__("the engine has stopped", code="engine_stopped", retry_after_seconds=RETRY_STOPPED_SECONDS)


class DeadlineExceeded(ApiError):
    status = 503
    type = "server_error"
    code = "deadline_exceeded"

    def __init__(self) -> None:
        super().__init__("the request timed out before the server could answer it")


class InternalError(ApiError):
    status = 500
    type = "server_error"
    code = "internal_error"

    def __init__(self, message: str = "the server failed to handle this request") -> None:
        super().__init__(message)


def install_error_handlers(app: FastAPI) -> None:
    """Convert these exceptions into error responses. `LastResort` handles all others."""
    for kind in (ApiError, InvalidRequest, ConversationError, EngineError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, respond)


async def respond(request: Request, error: Exception) -> Response:
    refusal = as_api_error(error)
    if record := request.scope.get("state", {}).get("record"):
        record.refused(refusal)
    return refusal.response()


def as_api_error(error: Exception) -> ApiError:
    match error:
        case ApiError():
            return error
        case InvalidRequest():
            code = CONTEXT_EXCEEDED if isinstance(error, ContextLengthExceeded) else None
            return InvalidField(error.field, error.message, code=code)
        case ConversationError():
            return InvalidField("messages", str(error))
        case EngineError():
            return from_engine(error)
        case RequestValidationError():
            return from_validation(error)
        case _:
            return from_http(error) if isinstance(error, HTTPException) else InternalError()


def from_engine(error: EngineError) -> ApiError:
    if isinstance(error, ConstraintLimit):
        log.warning("a grammar exceeded its limits while sampling")
        return TooComplex(str(error))
    if isinstance(error, NoTokenAllowed):
        return Unsatisfiable(f"{error}: check that allowed_token_ids and bad_words do not contradict it")
    return EngineGone() if isinstance(error, EngineStopped) else InternalError(str(error))


def from_http(error: HTTPException) -> ApiError:
    """Convert the router's 404 and 405, and unreadable bodies, whose cause may be an `ApiError`."""
    if isinstance(error.__cause__, ApiError):
        return error.__cause__
    headers = error.headers or {}
    messages = {
        HTTPStatus.NOT_FOUND: "no such endpoint; GET /openapi.json lists all endpoints",
        HTTPStatus.METHOD_NOT_ALLOWED: f"this endpoint accepts {headers.get('Allow', 'other methods')}",
    }
    refusal = ApiError(messages.get(HTTPStatus(error.status_code), str(error.detail)))
    refusal.status = error.status_code
    refusal.headers = headers
    return refusal


def from_validation(error: RequestValidationError) -> ApiError:
    """Convert the first validation error of a body."""
    first = error.errors()[0]
    place = first["loc"][1:]
    if first["type"] == "json_invalid":
        what = first["ctx"]["error"].removesuffix(" at")
        return ApiError(f"the body is not valid JSON: {what} at character {place[0]}")
    if first["type"] in ("missing", "model_attributes_type") and not place:
        return ApiError("the body must be a JSON object, sent with content-type application/json")
    message = plain(first["msg"])
    if decisive := first["type"].partition(WRONG_FIELD)[2]:
        return InvalidField(path(error.body, (*place, decisive), "missing"), message)
    if not place:
        return ApiError(f"invalid body: {message}")
    return InvalidField(as_sent(error.body, place) or path(error.body, place, first["type"]), message)


def as_sent(body: Any, place: Sequence[str | int]) -> str | None:
    """Return the alias by which the client sent a field, or None if it used the field's own name."""
    if not isinstance(body, dict) or place[0] in body:
        return None
    return next((name for name, own in ALIASES.items() if own == place[0] and name in body), None)


def path(body: Any, place: Sequence[str | int], kind: str) -> str:
    """Format an error's location like `messages[0].content`, without the tags of union members.

    Return only the top-level field for an item in a list of numbers or strings. `kind` is pydantic's error type.
    """
    is_nested = any(isinstance(part, str) and part.isidentifier() for part in place[1:])
    if not is_nested and kind not in ("model_type", "model_attributes_type", "dict_type"):
        return str(place[0])
    followed, value = "", body
    for part in place:
        if kind == "missing" and part == place[-1]:
            return f"{followed}.{part}".removeprefix(".")
        try:
            value = value[part]
        except (LookupError, TypeError):
            continue
        followed += f"[{part}]" if isinstance(part, int) else f".{part}"
    return followed.removeprefix(".") or str(place[0])
