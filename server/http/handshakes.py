"""Limits TLS connections whose handshake is not complete.

asyncio allows a minute per handshake, and uvicorn sees a connection only after its handshake. Without this limit,
clients that never complete the handshake would use up all file descriptors.
"""

import socket
from contextlib import suppress
from weakref import WeakValueDictionary


class Handshakes:
    """Counts established connections and unfinished handshakes.

    If both together exceed `limit`, the oldest unfinished handshake is shut down. `has_room` is then False until that
    socket is closed.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._num_established = 0
        self._sockets: WeakValueDictionary[int, socket.socket] = WeakValueDictionary()
        """Unfinished handshakes by descriptor, oldest first. Closed sockets disappear."""
        self._closing: socket.socket | None = None

    def begin(self, accepted: socket.socket) -> None:
        self._sockets.pop(accepted.fileno(), None)  # descriptors are reused: insert the new socket last
        self._sockets[accepted.fileno()] = accepted
        if self._num_established + len(self._sockets) > self._limit:
            self._shut_down_oldest()

    @property
    def has_room(self) -> bool:
        """Return whether another connection may be accepted: no shut-down socket is still open."""
        if self._closing and self._closing.fileno() < 0:
            self._closing = None
        return self._closing is None

    def end(self, descriptor: int) -> None:
        self._sockets.pop(descriptor, None)
        self._num_established += 1

    def leave(self) -> None:
        self._num_established -= 1

    def _shut_down_oldest(self) -> None:
        oldest = self._sockets.pop(next(iter(self._sockets)))
        with suppress(OSError):  # the client may have disconnected
            oldest.shutdown(socket.SHUT_RDWR)
            self._closing = oldest
