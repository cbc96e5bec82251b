"""The errors of the HTTP API. The body of every error response is `ApiError.body`."""

import json
import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from http import HTTPStatus
from typing import Any

import structlog
from fastapi import Request
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
from nvium_core.errors import rephrase
from nvium_core.text.chat_template import ConversationError
from nvium_core.text.sandbox import HelperStuck

MAX_MESSAGE_CHARACTERS = 1000
"""Longer messages are truncated, because a message may quote a long part of the request."""

MAX_NAMES, MAX_ERRORS = 100, 20
"""Objects with more fields, and errors after the first ones, are not searched for a misspelt field."""

RETRY_STOPPED_SECONDS = 5

CONTEXT_EXCEEDED = "context_length_exceeded"
TOO_COSTLY = "too_costly"

MISSING, WRONG_TYPE, OUT_OF_RANGE = "missing_required_parameter", "invalid_type", "out_of_range"
INVALID, UNKNOWN, UNSUPPORTED = "invalid_value", "unknown_parameter", "unsupported_parameter"
"""Codes of validation errors."""

CODES = {
    r"missing": MISSING,
    r"extra_forbidden": UNKNOWN,
    r".*(_type|_parsing|_from_float)|described|wrong_field:": WRONG_TYPE,
    r"(greater|less)_than.*|.*too_(short|long|many)|finite_number": OUT_OF_RANGE,
}
"""Maps patterns of pydantic's types of errors, and of ours, to codes. All other types have the code `INVALID`."""

WRONG_FIELD = "wrong_field:"
"""Prefix of the type of a custom pydantic error. The rest of the type is the name of the invalid field."""

REJECTIONS = {
    "bodies_too_large": 503,
    "body_too_large": 413,
    "deadline_exceeded": 503,
    "draining": 503,
    "engine_stopped": 503,
    "host_not_allowed": 403,
    "invalid_api_key": 401,
    "malformed_request": 400,
    "no_replica": 503,
    "not_live": 503,
    "not_ready": 503,
    "origin_not_allowed": 403,
    "queue_full": 503,
    "rate_limit_exceeded": 429,
    "request_timeout": 408,
    "unsupported_body": 415,
}
"""HTTP status by error code, for rejected requests and connections. Metrics count rejections by code."""

log = structlog.get_logger("nvium.server")


class ApiError(Exception):
    """An error that the client receives as a response."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message[:MAX_MESSAGE_CHARACTERS]
        self.status = status
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def type(self) -> str:
        if self.status >= 500:
            return "server_error"
        return "requests" if self.status == HTTPStatus.TOO_MANY_REQUESTS else "invalid_request_error"

    @property
    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        return Response(json.dumps(self.body), self.status, self.headers, "application/json")


class InvalidField(ApiError):
    """An invalid field of a request. The message starts with the field's name.

    If the context is exceeded, the message has OpenAI's wording, because clients match it.
    """

    def __init__(self, param: str, message: str, *, code: str = INVALID) -> None:
        text = message if code == CONTEXT_EXCEEDED else f"{param}: {message}"
        super().__init__(text, param=param, code=code)


class Rejected(ApiError):
    """A rejected request or connection. `code` is one of `REJECTIONS`."""

    def __init__(
        self,
        code: str,
        message: str,
        *,
        retry_after_seconds: int | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message, status=REJECTIONS[code], code=code, headers=headers)
        if retry_after_seconds is not None:
            self.headers["retry-after"] = str(retry_after_seconds)


def engine_stopped(
    message: str = "the server shut down before the answer was complete; send the request again",
) -> Rejected:
    return Rejected("engine_stopped", message, retry_after_seconds=RETRY_STOPPED_SECONDS)


def deadline_exceeded() -> Rejected:
    return Rejected("deadline_exceeded", "the request timed out before the server could answer it")


def internal_error(message: str = "the server failed to handle this request") -> ApiError:
    return ApiError(message, status=500, code="internal_error")


async def respond(request: Request, error: Exception) -> Response:
    refusal = as_api_error(error)
    request.state.record.refused(refusal)
    return refusal.response()


OURS = ApiError, InvalidRequest, ConversationError, EngineError, HelperStuck
HANDLERS: dict[Any, Any] = dict.fromkeys((*OURS, RequestValidationError, HTTPException), respond)


def as_api_error(error: Exception) -> ApiError:
    match error:
        case ApiError():
            return error
        case InvalidRequest():
            code = CONTEXT_EXCEEDED if isinstance(error, ContextLengthExceeded) else OUT_OF_RANGE
            return InvalidField(error.field, error.message, code=code)
        case ConversationError():
            return InvalidField(error.field, str(error))
        case EngineError() | HelperStuck():
            return from_engine(error)
        case RequestValidationError():
            return from_validation(error)
        case _:
            return from_http(error) if isinstance(error, HTTPException) else internal_error()


def from_engine(error: EngineError | HelperStuck) -> ApiError:
    if isinstance(error, HelperStuck):
        return deadline_exceeded()
    if isinstance(error, ConstraintLimit):
        log.warning("a grammar exceeded its limits while sampling")
        return ApiError(str(error), code=TOO_COSTLY)
    if isinstance(error, NoTokenAllowed):
        return ApiError(str(error), code="no_token_allowed")
    return engine_stopped() if isinstance(error, EngineStopped) else internal_error(str(error))


def from_http(error: HTTPException) -> ApiError:
    """Convert an error of the router or of reading the body. If its cause is an `ApiError`, return the cause."""
    if isinstance(error.__cause__, ApiError):
        return error.__cause__
    headers = error.headers or {}
    known = {
        HTTPStatus.NOT_FOUND: ("no such endpoint; GET /openapi.json lists the supported ones", "unknown_url"),
        HTTPStatus.METHOD_NOT_ALLOWED: (
            f"this endpoint accepts {headers.get('Allow', 'other methods')}",
            "method_not_allowed",
        ),
    }
    message, code = known.get(HTTPStatus(error.status_code), (str(error.detail), None))
    return ApiError(message, status=error.status_code, code=code, headers=headers)


def from_validation(error: RequestValidationError) -> ApiError:
    errors = error.errors()
    first = next((found for found in errors[:MAX_ERRORS] if misspelt(found)), errors[0])
    place, code = first["loc"][1:], code_of(first["type"])
    if first["type"] in ("missing", "model_attributes_type") and not place:
        return ApiError("the body must be a JSON object", code=WRONG_TYPE)
    message = rephrase(first["msg"]) + misspelt(first)
    if decisive := first["type"].partition(WRONG_FIELD)[2]:
        return InvalidField(path(error.body, (*place, decisive), "missing"), message)
    if not place:
        return ApiError(f"invalid body: {message}", code=code)
    return InvalidField(path(error.body, place, first["type"]), message, code=code)


def misspelt(error: Mapping[str, Any]) -> str:
    """Name the given field that looks like a missing one."""
    given = error["input"]
    if error["type"] != "missing" or not isinstance(given, dict) or len(given) > MAX_NAMES:
        return ""
    close = get_close_matches(str(error["loc"][-1]), given, n=1, cutoff=0.75)
    return f"; `{close[0]}` is unknown" if close else ""


def code_of(kind: str) -> str:
    return next((code for pattern, code in CODES.items() if re.fullmatch(pattern, kind)), INVALID)


def path(body: Any, place: Sequence[str | int], kind: str) -> str:
    """Format an error's location, such as `messages[0].content`. Omit the tags of union members.

    For an item in a list of numbers or strings, return only the top-level field. `kind` is pydantic's error type.
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
