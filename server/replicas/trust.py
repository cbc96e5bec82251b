"""The layer around a replica that answers only its gateway, and trusts what that says about a request."""

import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from server.errors import InvalidKey
from server.http.keys import note_key
from server.http.middleware import refuse
from server.telemetry.metrics import Metrics

SECRET = "x-nvium-secret"  # noqa: S105 (a header's name)
KEY_ID = "x-nvium-key-id"


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
