"""Security headers for browsers. A route's own headers take precedence."""

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

PROTECTIVE = {
    "cache-control": "no-store",
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


class Protection:
    """Middleware that adds the headers to every response."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def protected_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                protect(MutableHeaders(scope=message))
            await send(message)

        await self._app(scope, receive, protected_send if scope["type"] == "http" else send)


def protect(headers: MutableHeaders) -> None:
    for name, value in PROTECTIVE.items():
        headers.setdefault(name, value)
