"""Forwards a request to a replica, and its response to the client: a stream event by event, another when complete."""

from io import BytesIO

import aiohttp
from starlette.datastructures import Headers
from starlette.types import Scope, Send
from yarl import URL

from server.errors import ApiError
from server.http.event_stream import broken_off
from server.replicas.fleet import Replica
from server.replicas.replica import IS_LAST, KEY_ID
from server.telemetry.record import RequestRecord

FORWARDED = ("accept", "content-type")
HOP_BY_HOP = (b"connection", b"date", b"keep-alive", b"server", b"transfer-encoding")
"""Response headers that are not forwarded, because the gateway's connection sets them itself."""

STOPPED, NOT_STORED = b'"code": "engine_stopped"', b'response_not_found"'
"""Text in the response of a replica whose engine has stopped, or that does not store a response."""


class StoredElsewhere(Exception):
    """The replica does not store the response that the request names."""


class Exchange:
    """One client's request and the response to it."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self.body = b""
        self.has_begun = False
        """Whether the response's head has been passed to `send`."""
        self._is_stream = False
        self.record: RequestRecord = scope["state"]["record"]
        self._method: str = scope["method"]
        query: bytes = scope["query_string"]
        self._target = (scope["raw_path"] + (b"?" + query if query else b"")).decode("latin-1")
        headers = Headers(scope=scope)
        self._headers = {name: headers[name] for name in FORWARDED if name in headers}
        self._headers |= {"x-request-id": self.record.request_id, KEY_ID: self.record.key_id}
        self._send = send

    async def forward(self, replica: Replica, *, is_last: bool) -> None:
        """Forward the request and the response. Raise `aiohttp.ClientError` or `OSError` if the replica is lost.

        Raise `StoredElsewhere` if another replica may store the response that the request names, unless `is_last`.
        """
        self.record.is_passed_on = True
        async with replica.session.request(
            self._method,
            URL(f"http://replica{self._target}", encoded=True),
            headers=self._headers | ({IS_LAST: ""} if is_last else {}),
            data=BytesIO(self.body) if self.body else None,
            allow_redirects=False,
        ) as response:
            await self._send_response(response, is_last=is_last)

    async def fail(self, error: ApiError) -> None:
        """End a stream that has begun with the error, or cut off another response. Raise it if nothing has begun."""
        self.record.is_passed_on = False
        if not self.has_begun:
            raise error
        if self._is_stream:
            await self._send_events(broken_off(error, self.record))
            await self._send({"type": "http.response.body", "body": b""})
        else:
            self.record.refused(error)

    async def _send_response(self, response: aiohttp.ClientResponse, *, is_last: bool) -> None:
        self._is_stream = response.content_type == "text/event-stream"
        if not self._is_stream:
            body = await response.read()
            if response.status == 503 and STOPPED in body:
                raise ConnectionError("the engine of the replica has stopped")
            if response.status in (400, 404) and NOT_STORED in body and not is_last:
                raise StoredElsewhere
            await self._begin(response)
            await self._send({"type": "http.response.body", "body": body})
            return
        unsent = b""
        async for piece in response.content.iter_any():
            events, end, unsent = (unsent + piece).rpartition(b"\n\n")
            if end:
                if not self.has_begun:
                    await self._begin(response)
                await self._send_events(events + end)
        await self._send({"type": "http.response.body", "body": b""})

    async def _begin(self, response: aiohttp.ClientResponse) -> None:
        self.has_begun = True
        headers = [(name.lower(), value) for name, value in response.raw_headers if name.lower() not in HOP_BY_HOP]
        await self._send({"type": "http.response.start", "status": response.status, "headers": headers})

    async def _send_events(self, events: bytes) -> None:
        await self._send({"type": "http.response.body", "body": events, "more_body": True})
