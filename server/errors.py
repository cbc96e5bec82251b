"""Errors, and the one form in which every response other than 2xx is sent.

ApiError
├── InvalidField      400  a field of the request is wrong
├── MalformedRequest  400  not HTTP, or a body that must not be parsed
├── TooComplex        400  a grammar exceeds its bounds while it is followed
├── Unsatisfiable     400  no token of the model continues the answer as it is asked for
├── InvalidKey        401  no key, or an unknown one
├── HostNotAllowed    403  not a name of this server
├── OriginNotAllowed  403  from a page of another site
├── ModelNotFound     404
├── RequestTimeout    408  the request did not arrive in time
├── BodyTooLarge      413  found before parsing
├── UnsupportedBody   415  encoded, or a form that a page has sent
├── HeadTooLarge      431  too long, or too many headers
├── RateLimited       429  too many requests with one key
├── Overloaded        503  queue full, draining or stopped; come back later
│   ├── BodiesTooLarge     the bodies of open requests take too much memory
│   ├── EngineGone         stopped or failed
│   └── TooManyConnections
├── DeadlineExceeded  503  the request's time was over before its first token
└── InternalError     500  says nothing about what happened inside
"""

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
from server.schemas.aliases import SAME

MAX_MESSAGE_CHARACTERS = 1000
"""Longer messages are cut, since they may quote the request."""

log = structlog.get_logger("nvium.server")

RETRY_STOPPED_SECONDS = 5

NO_ENDPOINT = "there is no such endpoint here; GET /openapi.json lists those there are"

CONTEXT_EXCEEDED = "context_length_exceeded"

NO_OBJECT = ("model_type", "model_attributes_type", "dict_type")
"""Pydantic's error types for a value that should be a JSON object."""


WRONG_FIELD = "wrong_field:"
"""Prefix of the error type for a union without a matching member; followed by the field that selects the member."""


class ApiError(Exception):
    """An error that is returned to the client."""

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
    """The message begins with the field's name, except for an exceeded context: clients match OpenAI's wording."""

    def __init__(self, param: str, message: str, *, code: str | None = None) -> None:
        text = message if code == CONTEXT_EXCEEDED else f"{param}: {message}"
        super().__init__(text, param=param, code=code)


class MalformedRequest(ApiError):
    code = "malformed_request"


class RequestTimeout(ApiError):
    status = 408
    code = "request_timeout"

    def __init__(self, seconds: float) -> None:
        super().__init__(f"the request did not arrive whole within {seconds:g} seconds")


class InvalidKey(ApiError):
    status = 401
    code = "invalid_api_key"
    headers = {"www-authenticate": "Bearer"}

    def __init__(self, message: str) -> None:
        super().__init__(f"{message}; send a key of this server as `Authorization: Bearer KEY` or `x-api-key: KEY`")


class HostNotAllowed(ApiError):
    status = 403
    code = "host_not_allowed"

    def __init__(self, host: str) -> None:
        super().__init__(f"{host[:100]!r} is not a name of this server; --allowed-hosts adds names")


class OriginNotAllowed(ApiError):
    status = 403
    code = "origin_not_allowed"

    def __init__(self, origin: str) -> None:
        super().__init__(f"pages of {origin[:100]!r} may not call this server; --cors-origins allows origins")


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
        named = ", ".join(map(repr, served))
        super().__init__(f"there is no model {asked!r} here; this server has {named}", param="model")


class BodyTooLarge(ApiError):
    status = 413
    code = "body_too_large"
    headers = {"connection": "close"}

    def __init__(self, max_bytes: int) -> None:
        super().__init__(f"the request's body is larger than {max_bytes} bytes")


class HeadTooLarge(ApiError):
    status = 431
    code = "head_too_large"

    def __init__(self, max_bytes: int, max_lines: int) -> None:
        super().__init__(f"the request's head is larger than {max_bytes} bytes or {max_lines} lines")


class RateLimited(ApiError):
    status = 429
    type = "requests"
    code = "rate_limit_exceeded"

    def __init__(self, requests_per_minute: int, retry_after_seconds: int) -> None:
        super().__init__(f"more than {requests_per_minute} requests in a minute; retry in {retry_after_seconds} s")
        self.headers = {"retry-after": str(retry_after_seconds)}


class Overloaded(ApiError):
    status = 503
    type = "server_error"

    def __init__(self, message: str, *, code: str, retry_after_seconds: int) -> None:
        super().__init__(message, code=code)
        self.headers = {"retry-after": str(retry_after_seconds)}


class BodiesTooLarge(Overloaded):
    def __init__(self, max_bytes: int) -> None:
        message = (
            f"the bodies of requests that are being answered take all of {max_bytes} bytes, or this key's share of them"
        )
        super().__init__(message, code="bodies_too_large", retry_after_seconds=1)
        self.headers = {**self.headers, "connection": "close"}


class TooManyConnections(Overloaded):
    def __init__(self, max_connections: int) -> None:
        message = f"there are {max_connections} connections already"
        super().__init__(message, code="too_many_connections", retry_after_seconds=1)


class EngineGone(Overloaded):
    def __init__(self) -> None:
        super().__init__("the engine has stopped", code="engine_stopped", retry_after_seconds=RETRY_STOPPED_SECONDS)


class DeadlineExceeded(ApiError):
    status = 503
    type = "server_error"
    code = "deadline_exceeded"

    def __init__(self) -> None:
        super().__init__("the request's time was over before it could be answered")


class InternalError(ApiError):
    status = 500
    type = "server_error"
    code = "internal_error"

    def __init__(self, message: str = "the server failed to handle this request") -> None:
        super().__init__(message)


def install_error_handlers(app: FastAPI) -> None:
    """Answer these exceptions in the error form; `LastResort` answers all others."""
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
        log.warning("a grammar was too complex to be followed")
        return TooComplex(str(error))
    if isinstance(error, NoTokenAllowed):
        return Unsatisfiable(f"{error}: it may contradict allowed_token_ids or bad_words")
    return EngineGone() if isinstance(error, EngineStopped) else InternalError(str(error))


def from_http(error: HTTPException) -> ApiError:
    """Convert the router's 404 and 405, and unreadable bodies; their cause may have the details."""
    if isinstance(error.__cause__, ApiError):
        return error.__cause__
    is_unknown = error.status_code == HTTPStatus.NOT_FOUND
    refusal = ApiError(NO_ENDPOINT if is_unknown else str(error.detail))
    refusal.status = error.status_code
    refusal.headers = error.headers or {}
    return refusal


def from_validation(error: RequestValidationError) -> ApiError:
    """The first error of a body, with its field."""
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
        return ApiError(f"the body cannot be used: {message}")
    return InvalidField(as_sent(error.body, place) or path(error.body, place, first["type"]), message)


def as_sent(body: Any, place: Sequence[str | int]) -> str | None:
    """The alias that the client used for one of our fields; None for any other field."""
    if not isinstance(body, dict) or place[0] in body:
        return None
    return next((name for name, own in SAME.items() if own == place[0] and name in body), None)


def path(body: Any, place: Sequence[str | int], kind: str) -> str:
    """The place of an error as `messages[0].content`, without the members of unions, which pydantic also names.

    An item in a list of numbers or strings is named by its field alone. `kind` is pydantic's type of the error.
    """
    is_within = any(isinstance(part, str) and part.isidentifier() for part in place[1:])
    if not is_within and kind not in NO_OBJECT:
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
