"""A client's connection: uvicorn's, with bounds on slow clients. Knows framing, not what a request means."""

import asyncio
import select
import time
import uuid
from typing import Any, cast

import h11
import structlog
from uvicorn.protocols.http.flow_control import CLOSE_HEADER, FlowControl
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from server.errors import ApiError, MalformedRequest, RequestTimeout, TooManyConnections
from server.http.handshakes import Handshakes
from server.http.parser import MAX_HEAD_BYTES, BoundedParser
from server.http.protection import protect
from server.http.room import Room
from server.telemetry.logs import SeldomLine
from server.telemetry.metrics import Metrics

FAST_PATH = "nvium.http.response.fast_path"
"""The ASGI extension that holds a connection's `FastPath`."""

MAX_BYTES_AHEAD = 65_536
"""Bytes of further requests that are read while one is answered."""

MAX_BYTES_AT_ONCE = 65_536
"""Bytes of one read. asyncio asks for 256 kB, which the allocator gets from the system anew each time."""

GRACE_SECONDS = 1
"""Delay that lets the writer detect and record a slow client first."""

SECONDS_BEYOND = 1
"""How long a connection beyond the bound may be silent."""

log = structlog.get_logger("nvium.server")
too_many = SeldomLine("too many connections")


class FastPath:
    """Writes to the body of an answer that has begun, while the client keeps up.

    The bytes are those of an `http.response.body` message, written without waiting, past the layers between, which pass
    such messages on unchanged, and past h11, which would check each one.
    """

    def __init__(self, transport: asyncio.Transport, flow: FlowControl, *, is_chunked: bool) -> None:
        self._transport = transport
        self._flow = flow
        self._is_chunked = is_chunked

    @property
    def is_open(self) -> bool:
        return not self._flow.write_paused and not self._transport.is_closing()

    def abort(self) -> None:
        self._transport.abort()

    def write(self, piece: bytes) -> None:
        """Add a piece. It must not be empty: in HTTP that ends the body."""
        assert piece
        self._transport.write(b"%x\r\n%b\r\n" % (len(piece), piece) if self._is_chunked else piece)


class Connection(H11Protocol):
    """uvicorn's connection, and:

    - A request must arrive completely within `arrival_seconds` of its first byte, or of the connection if it is the
      first.
    - An idle connection is closed in stages, and not if a request has arrived meanwhile.
    - A client that reads nothing for `slow_client_seconds` is disconnected.
    - A disconnect is noticed while a request is answered, even if the client has sent more than that request.
    - Malformed or oversized HTTP is refused in the error form, and so are requests beyond the bound on connections,
      except one probe each.
    - A request's state has `received_at`: when its first bytes were read, by `time.monotonic()`.
    - A scope's extensions have the connection's `FastPath`.
    """

    conn: BoundedParser

    def __init__(
        self,
        *,
        arrival_seconds: float,
        slow_client_seconds: float,
        room: Room,
        metrics: Metrics,
        handshakes: Handshakes | None = None,
        **given: Any,
    ) -> None:
        super().__init__(**given)
        self._metrics = metrics
        self.conn = BoundedParser(h11.SERVER, MAX_HEAD_BYTES)
        self._room = room
        self._handshakes = handshakes
        self._arrival_seconds = arrival_seconds
        self._cut_off_seconds = slow_client_seconds + GRACE_SECONDS
        self._received_at: float | None = None
        self._arrival: asyncio.TimerHandle | None = None
        self._cut_off: asyncio.TimerHandle | None = None
        self._is_leaving = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast("asyncio.Transport", transport))
        cast("Any", transport).max_size = MAX_BYTES_AT_ONCE
        if self._handshakes:
            self._handshakes.end(transport.get_extra_info("socket").fileno())
        self._time_arrival()
        if len(self.connections) > self._room.num_connections:
            self._room.hold(self)
            self.loop.call_later(SECONDS_BEYOND, self._end_silence)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._room.release(self)
        if self._handshakes:
            self._handshakes.leave()
        self._stop_timers()

    def data_received(self, data: bytes) -> None:
        if self._is_leaving:
            return
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
            scope["extensions"] = {FAST_PATH: FastPath(self.transport, self.flow, is_chunked=is_chunked)}
            if self._room.holds(self):  # one answer, then room for other probes
                self.headers.append(CLOSE_HEADER)
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
        """Keep the connection if the client has read something meanwhile."""
        if self.transport.get_write_buffer_size() < num_bytes:
            self._time_cut_off()
        else:
            self.transport.abort()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._cut_off:
            self._cut_off.cancel()

    def timeout_keep_alive_handler(self) -> None:
        """Close as RFC 9112 (9.6) asks: answer what has arrived, else end our side and await the client's end."""
        if self.transport.is_closing():
            return
        if is_readable(self.transport):
            self.timeout_keep_alive_task = self.loop.call_later(GRACE_SECONDS, self.timeout_keep_alive_handler)
            return
        self._is_leaving = True
        if self.transport.can_write_eof():
            self.transport.write_eof()
        else:
            self.transport.close()
        is_read = self.transport.get_write_buffer_size() == 0
        self.loop.call_later(GRACE_SECONDS if is_read else self._cut_off_seconds, self.transport.abort)

    def _should_upgrade(self) -> bool:
        """No upgrade is offered; uvicorn would log each request for one."""
        return False

    def send_400_response(self, msg: str) -> None:
        self._refuse(self.conn.refusal or MalformedRequest(msg))

    def _time_arrival(self) -> None:
        """Run the timer while a request is arriving, or the first one awaited."""
        is_first = cast("object | None", self.cycle) is None
        has_begun = self.conn.their_state is h11.IDLE and (is_first or self.conn.trailing_data[0])
        is_arriving = has_begun or self.conn.their_state is h11.SEND_BODY
        if is_arriving and self._arrival is None:
            self._arrival = self.loop.call_later(self._arrival_seconds, self._end_arrival)
        elif not is_arriving and self._arrival:
            self._arrival.cancel()
            self._arrival = None

    def _end_arrival(self) -> None:
        """Answer 408; close silently if nothing has arrived."""
        if self.conn.their_state is h11.SEND_BODY or self.conn.trailing_data[0]:
            self._refuse(RequestTimeout(self._arrival_seconds))
        else:
            self.transport.close()

    def refuse_as_too_many(self) -> None:
        """Called for a connection beyond the bound."""
        self._room.release(self)
        self._refuse(TooManyConnections(self._room.num_connections))

    def _end_silence(self) -> None:
        has_asked = cast("object | None", self.cycle) is not None
        if self._room.holds(self) and not has_asked:
            self.refuse_as_too_many()

    def _refuse(self, error: ApiError) -> None:
        """Answer in place of the application and close."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE) and not self.transport.is_closing():
            scope = cast("dict[str, Any] | None", self.scope) or {}
            self._metrics.rejected.labels(error.code).inc()
            response, request_id = error.response(), scope.get("state", {}).get("request_id") or uuid.uuid4().hex
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


def is_readable(transport: asyncio.BaseTransport) -> bool:
    """Whether something has arrived that the event loop has not read yet."""
    arrived = select.poll()
    arrived.register(transport.get_extra_info("socket").fileno(), select.POLLIN)
    return bool(arrived.poll(0))
