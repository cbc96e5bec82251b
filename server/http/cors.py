"""CORS: lets pages of other origins call this server from a browser. Off unless origins are configured."""

from collections.abc import Collection, Sequence

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
"""Response headers that a page of an allowed origin may read."""


class Cors(CORSMiddleware):
    """Starlette's middleware. Allows all request headers, because clients add their own. Allows no cookies."""

    def __init__(self, app: ASGIApp, origins: Collection[str], methods: Sequence[str]) -> None:
        super().__init__(
            app,
            allow_origins=origins,
            allow_methods=methods,
            allow_headers=("*",),
            allow_private_network=True,
            expose_headers=EXPOSED,
        )

    def preflight_response(self, request_headers: Headers) -> Response:
        """Return Starlette's response, or an error in the API's form if Starlette refuses."""
        response = super().preflight_response(request_headers)
        if response.status_code < 400:
            return response
        refusal = ApiError(bytes(response.body).decode()).response()
        refusal.headers["vary"] = response.headers["vary"]
        return refusal
