"""Limits on connections: how many there are, how long they stand still, and what their clients leave unread.

Only this module uses undocumented names of uvicorn's protocol: `H11Protocol` and its `conn`, `cycle`, `flow`,
`transport` and `timeout_keep_alive_task`; the cycle's `scope`, `more_body` and `response_complete`; the flow's
`read_paused`, `write_paused` and `resume_reading`; and `connections` of `ServerState`.
"""

import asyncio
import time
from collections import Counter
from enum import IntEnum
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import h11
import structlog
from uvicorn.protocols.http.h11_impl import H11Protocol

from server.http.bodies import Guarded
from server.settings import Settings
from server.telemetry.metrics import Metrics

MAX_HEAD_BYTES = 16_384

FREE_CHUNKS = 2_000
BYTES_PER_CHUNK = 256
"""A body may have `FREE_CHUNKS` chunks of any size. Further chunks must have `BYTES_PER_CHUNK` bytes on average."""

SWEEP_SECONDS = 1

MIN_BYTES_PER_SECOND = 1_000
"""A client that leaves more than asyncio's write buffer of 64 KiB unread must read at least this fast."""

MAX_BYTES_AHEAD = 65_536
"""While the server answers a request, it reads about this many bytes of the client's next requests."""

UNREAD_RATIO = 8  # the limit on unread bytes of responses, as a multiple of `--max-present-bytes`

NUM_CLOSING = 48
"""Connections beyond the limit, while others close to make room. If none can make room, uvicorn answers 503."""

EVICTED_SHARE = 64
"""A new connection beyond the limit closes up to 1/64 of the others, because looking for them takes time."""

FRESH_SECONDS = 0.25  # how long a silent connection is fresh: its request may be on its way
MAX_FRESH = 32  # connections beyond the limit before fresh ones are closed; less than `NUM_CLOSING`

log = structlog.get_logger("nvium.server")


class Parser(h11.Connection):
    """h11's parser. It also refuses a body of many small chunks, because each takes 20 µs to parse.

    After it has refused a request, it ignores the app's response. h11 would raise, which uvicorn and asyncio would log.
    """

    _is_mute = False

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        try:
            event: Any = super().next_event()
            if isinstance(event, h11.Request):
                self._num_left = FREE_CHUNKS * BYTES_PER_CHUNK
            elif isinstance(event, h11.Data):
                self._num_left += len(event.data) - BYTES_PER_CHUNK
                if self._num_left < 0:
                    raise h11.RemoteProtocolError("the body's chunks are too small")
            return event
        except h11.RemoteProtocolError:
            self._is_mute = self.our_state not in (h11.IDLE, h11.SEND_RESPONSE)  # uvicorn cannot send its 400
            raise

    def send(self, event: Any) -> Any:
        is_refused = self.our_state is h11.MUST_CLOSE and not isinstance(event, h11.ConnectionClosed)
        return b"" if self._is_mute or is_refused else super().send(event)


class Phase(IntEnum):
    """What a connection waits for. A new connection may take the place of one in the first three phases, in order."""

    SILENT = 0  # the head of a request
    IDLE = 1  # the first byte of another request
    SENDING = 2  # the body of a request
    WORKING = 3  # the app
    UNREAD = 4  # the client, which reads too slowly
    CLOSING = 5


class Watch(NamedTuple):
    """A connection's phase and request, since when they are the same, and how much the client had read by then."""

    phase: Phase
    cycle: int  # its id; a reference would keep a closed connection in memory
    since: float
    num_read: int


class Connections:
    """uvicorn's factory of protocols, for its option `http`. Closes connections, but never one with a whole request.

    - At `max_connections`, a new connection takes the place of one that has sent no whole request.
    - A head must arrive within `--arrival-seconds`.
    - A client must read `MIN_BYTES_PER_SECOND` over `--slow-client-seconds`, and must let a closed connection end.
    - Beyond a total of unread bytes, the key with the most loses the connection that has waited for the longest time.
    - A disconnect is detected while a request is answered, although the client has already sent its next requests.
    """

    def __init__(self, max_connections: int, settings: Settings, metrics: Metrics) -> None:
        self._max_connections = max_connections
        self._max_unread = UNREAD_RATIO * settings.max_present_bytes
        slow_seconds = settings.slow_client_seconds
        self._limits = {Phase.SILENT: settings.arrival_seconds, Phase.UNREAD: slow_seconds, Phase.CLOSING: slow_seconds}
        self._min_read = MIN_BYTES_PER_SECOND * slow_seconds
        self._metrics = metrics
        self._watched = WeakKeyDictionary[H11Protocol, Watch]()
        self._open: Any = None
        self._num_evicted = 0
        """Connections closed to make room since the last sweep."""

    def __call__(self, **kwargs: Any) -> H11Protocol:
        connection = H11Protocol(**kwargs)
        connection.conn = Parser(h11.SERVER, MAX_HEAD_BYTES)
        if self._open is None:
            asyncio.get_running_loop().call_later(SWEEP_SECONDS, self._sweep)
        self._open = connection.connections
        self._watched[connection] = Watch(Phase.SILENT, id(None), time.monotonic(), 0)
        if len(self._open) >= self._max_connections:
            self._make_room()
        return connection

    def _make_room(self) -> None:
        """Close some of the connections that have been silent for the longest time, else idle, else sending.

        Of a burst of new connections, none must close another while older ones wait. So fresh ones come last.
        """
        phases = {connection: phase_of(connection) for connection in self._open}
        fresh_from = time.monotonic() - FRESH_SECONDS
        fresh = {each for each, phase in phases.items() if phase is Phase.SILENT and self._since(each) > fresh_from}
        num_excess = sum(phase is not Phase.CLOSING for phase in phases.values()) - self._max_connections
        last_phase = Phase.IDLE if fresh else Phase.SENDING
        waiting = [each for each, phase in phases.items() if phase <= last_phase and each not in fresh]
        share = max(1, self._max_connections // EVICTED_SHARE)
        evicted = sorted(waiting, key=lambda each: (phases[each], self._since(each)))[: max(share, num_excess)]
        if not evicted and num_excess >= MAX_FRESH:
            evicted = sorted(fresh, key=self._since)[:share]
        for connection in evicted:
            connection.transport.abort()
            self._metrics.evicted_connections.inc()
        self._num_evicted += len(evicted)

    def _since(self, connection: H11Protocol) -> float:
        return self._watched[connection].since

    def _sweep(self) -> None:
        asyncio.get_running_loop().call_later(SWEEP_SECONDS, self._sweep)
        now = time.monotonic()
        for connection in list(self._open):
            watch = Watch(phase_of(connection), id(connection.cycle), now, num_read(connection))
            last = self._watched.get(connection, watch)
            if (last.phase, last.cycle) == (watch.phase, watch.cycle):
                watch = self._checked(connection, last, watch)
            self._watched[connection] = watch
            if watch.phase in (Phase.WORKING, Phase.UNREAD):
                flow = connection.flow
                if flow.read_paused and len(connection.conn.trailing_data[0]) < MAX_BYTES_AHEAD:
                    flow.resume_reading()  # behind pipelined requests, because only reading detects a disconnect
        self._bound_unread()
        if len(self._open) > self._max_connections:
            self._make_room()
        if self._num_evicted:
            event, allowed = "closed waiting connections to make room for new ones", self._max_connections
            log.warning(event, times=self._num_evicted, allowed=allowed)
            self._num_evicted = 0

    def _checked(self, connection: H11Protocol, last: Watch, watch: Watch) -> Watch:
        """Abort a connection that has been in its phase for too long. Return what to compare the next watch with."""
        if watch.since - last.since < self._limits.get(watch.phase, watch.since):
            return last
        if watch.phase is Phase.UNREAD and watch.num_read - last.num_read >= self._min_read:
            return watch
        cut_off(connection)
        return last

    def _bound_unread(self) -> None:
        unread = {each: num_unread(each) for each in self._open if self._watched[each].phase is Phase.UNREAD}
        while len(unread) > 1 and sum(unread.values()) > self._max_unread:
            totals = Counter[str]()
            for connection, number in unread.items():
                totals[key_of(connection)] += number
            largest = totals.most_common(1)[0][0]
            slowest = min((each for each in unread if key_of(each) == largest), key=self._since)
            del unread[slowest]
            cut_off(slowest)


def phase_of(connection: H11Protocol) -> Phase:
    cycle: Any = connection.cycle
    if connection.transport.is_closing():
        return Phase.CLOSING
    if cycle is None or cycle.response_complete:
        return Phase.IDLE if connection.timeout_keep_alive_task else Phase.SILENT
    if connection.flow.write_paused:
        return Phase.UNREAD
    return Phase.SENDING if cycle.more_body else Phase.WORKING


def state_of(connection: H11Protocol) -> dict[str, Any]:
    """Return the `state` that the app sees. `RequestContext` and `Guard` have added to it."""
    cycle: Any = connection.cycle
    return cycle.scope["state"] if cycle else {}


def num_read(connection: H11Protocol) -> int:
    """Return how much of the response the client has taken, or its kernel and ours."""
    guarded: Guarded | None = state_of(connection).get("guarded")
    return guarded.num_sent - connection.transport.get_write_buffer_size() if guarded else 0


def num_unread(connection: H11Protocol) -> int:
    state = state_of(connection)
    return connection.transport.get_write_buffer_size() + state["guarded"].num_unsent


def key_of(connection: H11Protocol) -> str:
    return str(state_of(connection)["record"].key_id)


def cut_off(connection: H11Protocol) -> None:
    if phase_of(connection) is Phase.UNREAD:
        state_of(connection)["record"].aborted("slow_client")
    connection.transport.abort()
