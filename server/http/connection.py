"""A client's connection: uvicorn's, with bounds on how slow a client is. Knows framing, and no request's meaning."""

import asyncio
import time
import uuid
from typing import Any, cast

import h11
import structlog
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from server.errors import ApiError, MalformedRequest, RequestTimeout, TooManyConnections
from server.http.parser import MAX_HEAD_BYTES, BoundedParser
from server.http.protection import protect
from server.http.room import Room
from server.telemetry.logs import SeldomLine

SHORT_WAY = "nvium.http.response.short_way"
"""The extension by which an application adds to the body of an answer that has begun, a `ShortWay`."""

MAX_BYTES_AHEAD = 65_536
"""How much is read of further requests while one is answered."""

GRACE_SECONDS = 1
"""For whoever writes to notice first that the client is slow, and say so."""

SECONDS_BEYOND = 1
"""How long a connection beyond the bound may say nothing."""

log = structlog.get_logger("nvium.server")
too_many = SeldomLine("too many connections")


class ShortWay:
    """Adds to the body of an answer, once it has begun and as long as the client takes what it is sent.

    What is written is what a message `http.response.body` would have sent: past the layers between, which have nothing
    to do with one, past h11, which looks for all that could be wrong with each, and without waiting.
    """

    def __init__(self, transport: asyncio.Transport, flow: FlowControl, *, is_chunked: bool) -> None:
        self._transport = transport
        self._flow = flow
        self._is_chunked = is_chunked

    @property
    def is_open(self) -> bool:
        return not self._flow.write_paused and not self._transport.is_closing()

    def write(self, piece: bytes) -> None:
        """Add a piece, which must not be empty: to HTTP that would be the end."""
        assert piece
        self._transport.write(b"%x\r\n%b\r\n" % (len(piece), piece) if self._is_chunked else piece)


class Connection(H11Protocol):
    """Beyond uvicorn's:

    A request must have arrived whole `arrival_seconds` after the connection was made or the last answer given.
    A client that takes nothing of what it is sent for `slow_client_seconds` is cut off.
    A client that has sent more than its request is still seen to go while that is answered.
    What is no HTTP, or more of it than a client has use for, is refused in the form of all errors; so is what a
    connection asks for that there was no room for, unless that is a probe.
    A request knows when its first bytes were read, which is before its turn on the event loop comes: `received_at` of
    its state, by `time.monotonic()`.
    An answer of many pieces has a `ShortWay` to the client, among the extensions of its scope.
    """

    conn: BoundedParser

    def __init__(self, *, arrival_seconds: float, slow_client_seconds: float, room: Room, **given: Any) -> None:
        super().__init__(**given)
        self.conn = BoundedParser(h11.SERVER, MAX_HEAD_BYTES)
        self._room = room
        self._arrival_seconds = arrival_seconds
        self._cut_off_seconds = slow_client_seconds + GRACE_SECONDS
        self._received_at: float | None = None
        self._arrival: asyncio.TimerHandle | None = None
        self._cut_off: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast("asyncio.Transport", transport))
        self._time_arrival()
        if len(self.connections) > self._room.num_connections:
            self._room.hold(self)
            self.loop.call_later(SECONDS_BEYOND, self._end_silence)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._room.release(self)
        self._stop_timers()

    def data_received(self, data: bytes) -> None:
        if self._room.holds(self):
            if len(self.connections) <= self._room.num_connections:
                self._room.release(self)
            elif not self._room.admits(self, data):
                self.refuse_as_too_many()
                return
        belongs_to_next = self.conn.their_state is not h11.SEND_BODY
        if belongs_to_next and self._received_at is None:
            self._received_at = time.monotonic()
        super().data_received(data)

    def handle_events(self) -> None:
        super().handle_events()
        if (scope := cast("dict[str, Any] | None", self.scope)) and "received_at" not in scope["state"]:
            scope["state"]["received_at"] = self._received_at
            self._received_at = self._received_at if self.conn.trailing_data[0] else None
            is_chunked = scope["http_version"] >= "1.1"
            scope["extensions"] = {SHORT_WAY: ShortWay(self.transport, self.flow, is_chunked=is_chunked)}
        self._time_arrival()
        if self.conn.their_state is h11.DONE and len(self.conn.trailing_data[0]) < MAX_BYTES_AHEAD:
            self.flow.resume_reading()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._time_cut_off()

    def _time_cut_off(self) -> None:
        waiting = self.transport.get_write_buffer_size()
        self._cut_off = self.loop.call_later(self._cut_off_seconds, self._cut_off_unless_below, waiting)

    def _cut_off_unless_below(self, num_bytes: int) -> None:
        """A client that took something in all the time may go on."""
        if self.transport.get_write_buffer_size() < num_bytes:
            self._time_cut_off()
        else:
            self.transport.abort()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._cut_off:
            self._cut_off.cancel()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self.loop.call_later(self._cut_off_seconds, self.transport.abort)  # what is not taken cannot be closed

    def send_400_response(self, msg: str) -> None:
        self._refuse(self.conn.refusal or MalformedRequest(msg))

    def _time_arrival(self) -> None:
        """Let the time run while a request is awaited or arriving."""
        is_arriving = self.conn.their_state in (h11.IDLE, h11.SEND_BODY)
        if is_arriving and self._arrival is None:
            self._arrival = self.loop.call_later(self._arrival_seconds, self._end_arrival)
        elif not is_arriving and self._arrival:
            self._arrival.cancel()
            self._arrival = None

    def _end_arrival(self) -> None:
        """Close without a word if nothing was said."""
        if self.conn.their_state is h11.SEND_BODY or self.conn.trailing_data[0]:
            self._refuse(RequestTimeout(self._arrival_seconds))
        else:
            self.transport.close()

    def refuse_as_too_many(self) -> None:
        """Called for a connection that there was no room for."""
        self._room.release(self)
        self._refuse(TooManyConnections(self._room.num_connections))

    def _end_silence(self) -> None:
        has_asked = cast("object | None", self.cycle) is not None
        if self._room.holds(self) and not has_asked:
            self.refuse_as_too_many()

    def _refuse(self, error: ApiError) -> None:
        """Answer in place of the application, and close."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE) and not self.transport.is_closing():
            begun = cast("dict[str, Any] | None", self.scope) or {}
            response, request_id = error.response(), begun.get("state", {}).get("request_id") or uuid.uuid4().hex
            if isinstance(error, TooManyConnections):
                too_many.tell(allowed=self._room.num_connections)
            else:
                log.info("refused", request_id=request_id, status=error.status, code=error.code)
            protect(response.headers)
            named = [*response.raw_headers, (b"connection", b"close"), (b"x-request-id", request_id.encode())]
            reason = STATUS_PHRASES[error.status]
            head = h11.Response(status_code=error.status, headers=named, reason=reason)
            body = b"" if self.conn.is_head else bytes(response.body)
            for event in (head, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _stop_timers(self) -> None:
        for timer in (self._arrival, self._cut_off):
            if timer:
                timer.cancel()
