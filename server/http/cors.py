"""CORS: which origins' pages may call this server from a browser. Off unless origins are configured."""

from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp

from server.errors import ApiError

EXPOSED = (
    "retry-after",
    "x-nvium-ignored-params",
    "x-ratelimit-limit-requests",
    "x-ratelimit-remaining-requests",
    "x-ratelimit-reset-requests",
    "x-request-id",
)
"""Response headers that such a page may read."""


class Cors(CORSMiddleware):
    """Allows any request header, as clients have their own; the server uses no cookies, so no credentials."""

    def __init__(self, app: ASGIApp, origins: Collection[str]) -> None:
        super().__init__(
            app,
            allow_origins=origins,
            allow_methods=("GET", "HEAD", "POST"),
            allow_headers=("*",),
            expose_headers=EXPOSED,
        )

    def preflight_response(self, request_headers: Headers) -> Response:
        """Starlette's response, with refusals in the error form."""
        response = super().preflight_response(request_headers)
        if response.status_code < 400:
            return response
        refusal = ApiError(bytes(response.body).decode()).response()
        refusal.headers["vary"] = response.headers["vary"]
        return refusal
