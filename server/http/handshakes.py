"""Connections that were accepted and have not got as far as HTTP: with TLS, until they have shaken hands.

asyncio gives each a minute for that, and makes the connection known only then. So the bound on connections does not see
them, and silent ones would take all file descriptors.
"""

import socket
from contextlib import suppress
from weakref import WeakValueDictionary


class Handshakes:
    """Bounds connections together with those still shaking hands: beyond `most`, the one that began first is shut down,
    which ends it, and no other is to be accepted until its descriptor is free."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._num_known = 0
        self._sockets: WeakValueDictionary[int, socket.socket] = WeakValueDictionary()
        """Sockets by descriptor, in the order of acceptance. Closed ones drop out."""
        self._making_way: socket.socket | None = None

    def begin(self, accepted: socket.socket) -> None:
        self._sockets.pop(accepted.fileno(), None)  # a new one comes last
        self._sockets[accepted.fileno()] = accepted
        if self._num_known + len(self._sockets) > self._most:
            self._shut_down_first()

    @property
    def has_room(self) -> bool:
        """Whether the one that was shut down, if any, is closed: that takes some turns of the event loop."""
        if self._making_way and self._making_way.fileno() < 0:
            self._making_way = None
        return self._making_way is None

    def end(self, descriptor: int) -> None:
        """The handshake is complete."""
        self._sockets.pop(descriptor, None)
        self._num_known += 1

    def leave(self) -> None:
        """A connection has closed after its handshake."""
        self._num_known -= 1

    def _shut_down_first(self) -> None:
        first = self._sockets.pop(next(iter(self._sockets)))
        with suppress(OSError):  # it has gone
            first.shutdown(socket.SHUT_RDWR)
            self._making_way = first
