"""Pages of other sites: CORS lets in those of configured origins. Protects a server without keys from others."""

import socket
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Scope

from server.errors import ApiError, Rejected
from server.http.middleware import PAGE, Check, is_probe
from server.settings import Settings

ANY = "*"

EXPOSED = (
    "retry-after",
    "x-nvium-ignored-params",
    "x-ratelimit-limit-requests",
    "x-ratelimit-remaining-requests",
    "x-ratelimit-reset-requests",
    "x-request-id",
)
"""Response headers that a page of an allowed origin may read."""


class OriginCheck(Check):
    """Answers 403 if `Host` does not name this server, or if the request comes from a page that CORS does not allow.

    Checking `Host` prevents DNS rebinding. A link to the playground is allowed on any page.
    """

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        super().__init__(app)
        self._origins = settings.cors_origins
        own = socket.gethostname().lower()
        names = {"localhost", own, own.partition(".")[0], settings.host, *settings.allowed_hosts}
        self._names = names | {f"{own.partition('.')[0]}.local"}
        self._domains = (".localhost", *(name[1:] for name in settings.allowed_hosts if name.startswith("*.")))
        self._checks_host = ANY not in settings.allowed_hosts

    def check(self, scope: Scope, headers: Headers) -> None:
        if is_probe(scope):  # it changes nothing, and load balancers send any `Host`
            return
        host, origin = headers.get("host", ""), headers.get("origin")
        name = name_of(host)
        is_own = name in self._names or name.endswith(self._domains) or is_own_address(name, scope)
        if host and self._checks_host and not is_own:
            raise Rejected("host_not_allowed", f"host {host[:100]!r} is not allowed; --allowed-hosts adds hosts")
        if ANY in self._origins or origin in self._origins:
            return
        is_foreign = origin is not None and origin.lower().partition("://")[2] != host.lower()
        opens_page = scope["method"] == "GET" and scope["path"] == PAGE and headers.get("sec-fetch-mode") == "navigate"
        is_cross_site = headers.get("sec-fetch-site") == "cross-site" and not opens_page
        if is_foreign or is_cross_site:
            message = f"origin {(origin or 'another site')[:100]!r} is not allowed; --cors-origins adds origins"
            raise Rejected("origin_not_allowed", message)


def name_of(host: str) -> str:
    """Return the name or address in a `Host` header, without the port. If the header is malformed, return ""."""
    try:
        return (urlsplit(f"//{host}").hostname or "").removesuffix(".")
    except ValueError:
        return ""


def is_own_address(name: str, scope: Scope) -> bool:
    """Return whether the name is a loopback address or the address that the client connected to."""
    try:
        address = ip_address(name)
    except ValueError:
        return False
    server = scope.get("server")
    return address.is_loopback or address.is_unspecified or (server is not None and name == server[0])


class Cors(CORSMiddleware):
    """Starlette's middleware. Allows no cookies."""

    def preflight_response(self, request_headers: Headers) -> Response:
        """Return Starlette's response, or an error in the API's form if Starlette refuses."""
        response = super().preflight_response(request_headers)
        if response.status_code < 400:
            return response
        refusal = ApiError(bytes(response.body).decode()).response()
        refusal.headers["vary"] = response.headers["vary"]
        return refusal
