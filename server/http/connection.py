"""A client's connection: uvicorn's protocol, with limits for slow and malicious clients."""

import asyncio
import select
import sys
import time
import uuid
from typing import Any, cast

import h11
from uvicorn.protocols.http.flow_control import CLOSE_HEADER
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from server.errors import ApiError, Rejected, malformed
from server.http.connection_limit import ConnectionLimit
from server.http.lingering import Lingering
from server.http.middleware import protect
from server.http.parser import MAX_HEAD_BYTES, BoundedParser
from server.http.unread import UnreadBytes
from server.telemetry.logs import RateLimitedWarning
from server.telemetry.metrics import Metrics
from server.telemetry.record import RequestRecord

MAX_BYTES_AHEAD = 65_536
"""While the server answers a request, it reads at most this many bytes of the client's next requests."""

READ_BYTES = 65_536
"""Size of a read. With asyncio's default of 256 kB, every read would allocate its buffer by a system call."""

GRACE_SECONDS = 1  # how long a client may take to close a connection that the server has closed

MIN_BYTES_PER_SECOND = 1_000
"""A client that leaves more than asyncio's write buffer of 64 KiB unread must read at least this fast."""

EXCESS_SECONDS = 1  # an excess connection that sends nothing for this long is refused

too_many = RateLimitedWarning("too many connections")


class Connection(H11Protocol):
    """uvicorn's HTTP protocol with these additions:

    - A request must arrive completely within `arrival_seconds` of its first byte. The first request must arrive within
      `arrival_seconds` of the connection.
    - An idle connection is closed in stages, unless a request has arrived in the meantime.
    - A client that reads less than `MIN_BYTES_PER_SECOND` in `slow_client_seconds` is disconnected.
    - All clients together leave at most a limited number of bytes unread.
    - A disconnect is detected while a request is answered, even if the client has already sent its next requests.
    - Malformed or oversized HTTP is answered in the API's error form.
    - If a request is answered before it is read, the connection closes in stages, so that the answer arrives.
    - An excess connection (beyond the limit) may send one probe. Other requests on it are refused.
    - `scope["state"]["received_at"]` is the time of the request's first bytes, by `time.monotonic()`.
    """

    conn: BoundedParser

    def __init__(
        self,
        *,
        arrival_seconds: float,
        slow_client_seconds: float,
        limit: ConnectionLimit,
        metrics: Metrics,
        unread: UnreadBytes | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self._metrics = metrics
        self.conn = BoundedParser(h11.SERVER, MAX_HEAD_BYTES)
        self._limit = limit
        self._unread = unread or UnreadBytes(sys.maxsize)
        self._arrival_seconds = arrival_seconds
        self._cut_off_seconds = slow_client_seconds
        self._received_at: float | None = None
        self._arrival: asyncio.TimerHandle | None = None
        self._cut_off: asyncio.TimerHandle | None = None
        self._is_leaving = False
        self._was_refused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._lingering = Lingering(cast("asyncio.Transport", transport), self._must_linger)
        super().connection_made(cast("asyncio.Transport", self._lingering))
        cast("Any", transport).max_size = READ_BYTES
        self._time_arrival()
        if len(self.connections) > self._limit.num_connections:
            self._limit.add_excess(self)
            self.loop.call_later(EXCESS_SECONDS, self._refuse_if_silent)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._limit.release(self)
        self._unread.remove(self)
        self._limit.num_lingering -= self._lingering.is_lingering
        self._lingering.forget()
        for timer in (self._arrival, self._cut_off):
            if timer:
                timer.cancel()

    def data_received(self, data: bytes) -> None:
        if self._lingering.is_lingering:
            self._lingering.discard(data)
        if self._lingering.is_lingering or self._is_leaving:
            return
        if self._limit.is_excess(self):
            if len(self.connections) <= self._limit.num_connections:
                self._limit.release(self)
            elif not self._limit.admits(self, data):
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
            if self._limit.is_excess(self):  # close after one response, to make room for other probes
                self.headers.append(CLOSE_HEADER)
        self._time_arrival()
        if self.conn.their_state is h11.DONE and len(self.conn.trailing_data[0]) < MAX_BYTES_AHEAD:
            self.flow.resume_reading()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._time_cut_off()
        self._unread.add(self)

    def _time_cut_off(self) -> None:
        self._cut_off = self.loop.call_later(self._cut_off_seconds, self._cut_off_unless_below, self.num_unread)

    def _cut_off_unless_below(self, num_bytes: int) -> None:
        """Abort the connection if the client read too slowly since the timer started, otherwise restart the timer."""
        if num_bytes - self.num_unread >= MIN_BYTES_PER_SECOND * self._cut_off_seconds:
            self._time_cut_off()
        else:
            self.cut_off()

    @property
    def key(self) -> str:
        return str(self._state.get("key_id", ""))

    @property
    def num_unread(self) -> int:
        return self.transport.get_write_buffer_size() + int(self._state.get("num_unsent", 0))

    def cut_off(self) -> None:
        if record := self._state.get("record"):
            record.aborted("slow_client")
        self.transport.abort()

    @property
    def _state(self) -> dict[str, Any]:
        scope = cast("dict[str, Any] | None", self.scope) or {}
        return cast("dict[str, Any]", scope.get("state", {}))

    def resume_writing(self) -> None:
        super().resume_writing()
        self._unread.remove(self)
        if self._cut_off:
            self._cut_off.cancel()

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection in stages: stop writing, then wait for the client to close (RFC 9112, 9.6).

        If bytes have arrived in the meantime, try again later.
        """
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
        """Ignore upgrade requests. uvicorn would log each of them."""
        return False

    def send_400_response(self, msg: str) -> None:
        self._refuse(self.conn.refusal or malformed(msg))

    def _time_arrival(self) -> None:
        """Run the timer until the first request is complete, and whenever a later request is incomplete."""
        is_first = cast("object | None", self.cycle) is None
        has_begun = self.conn.their_state is h11.IDLE and (is_first or self.conn.trailing_data[0])
        is_arriving = has_begun or self.conn.their_state is h11.SEND_BODY
        if is_arriving and self._arrival is None:
            self._arrival = self.loop.call_later(self._arrival_seconds, self._end_arrival)
        elif not is_arriving and self._arrival:
            self._arrival.cancel()
            self._arrival = None

    def _end_arrival(self) -> None:
        """Refuse a request that took too long with 408. If no byte has arrived, close without a response."""
        if self.conn.their_state is h11.SEND_BODY or self.conn.trailing_data[0]:
            message = f"the server did not receive the whole request within {self._arrival_seconds:g} seconds"
            self._refuse(Rejected("request_timeout", message))
        else:
            self.transport.close()

    def refuse_as_too_many(self) -> None:
        self._limit.release(self)
        message = f"the limit of {self._limit.num_connections} connections is reached"
        self._refuse(Rejected("too_many_connections", message, retry_after_seconds=1))

    def _refuse_if_silent(self) -> None:
        has_request = cast("object | None", self.cycle) is not None
        if self._limit.is_excess(self) and not has_request:
            self.refuse_as_too_many()

    def _refuse(self, error: ApiError) -> None:
        """Respond with an error in place of the app, and close the connection."""
        self._was_refused = True
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE) and not self.transport.is_closing():
            response, request_id = error.response(), self._record_refusal(error).request_id
            protect(response.headers)
            headers = [*response.raw_headers, (b"connection", b"close"), (b"x-request-id", request_id.encode())]
            reason = STATUS_PHRASES[error.status]
            head = h11.Response(status_code=error.status, headers=headers, reason=reason)
            body = b"" if self.conn.is_head else bytes(response.body)
            for event in (head, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _record_refusal(self, error: ApiError) -> RequestRecord:
        """Record the error in the record of the request that is being received, which the app closes, or in a new one.

        Excess connections share a log line, because there may be many.
        """
        is_received = self.conn.our_state is h11.SEND_RESPONSE
        record: RequestRecord | None = self._state.get("record") if is_received else None
        if record is None:
            record = RequestRecord(self._metrics, request_id=uuid.uuid4().hex, received_at=self._received_at)
        record.refused(error)
        record.status = error.status
        is_excess = error.code == "too_many_connections"
        if is_excess:
            too_many.log(allowed=self._limit.num_connections)
        if is_received:
            self._state["record"] = record
        else:
            record.close(is_routine=is_excess)
        return record

    def _must_linger(self) -> bool:
        """Return whether a part of the request may be unread, and few other connections linger."""
        is_unread = self._was_refused or self.conn.their_state is h11.SEND_BODY
        if not is_unread or not self._limit.may_linger:
            return False
        self._limit.num_lingering += 1
        return True


def is_readable(transport: asyncio.BaseTransport) -> bool:
    """Return whether bytes have arrived that the event loop has not read yet."""
    poll = select.poll()
    poll.register(transport.get_extra_info("socket").fileno(), select.POLLIN)
    return bool(poll.poll(0))
