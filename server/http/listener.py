"""The listening socket, which accepts a few connections at a time."""

import socket
from typing import Any

from server.http.handshakes import Handshakes

BACKLOG = 2048
"""Length of the accept queue."""

MAX_ACCEPTED_IN_TURN = 4
"""Connections accepted in a turn of the event loop. Some turns pass until one beyond the bound is closed again."""


class Listener(socket.socket):
    """Accepts connections, a few at a time, then raises `BlockingIOError` once, as if no more were waiting.

    A burst accepted at once would take the descriptors of those beyond the bound before any of them can be refused, and
    then asyncio would accept nobody, no probe either, for a second.
    """

    def __init__(self, taken: socket.socket) -> None:
        super().__init__(fileno=taken.detach())
        self.handshakes: Handshakes | None = None
        self._num_in_turn = 0

    def accept(self) -> tuple[socket.socket, Any]:
        self._num_in_turn += 1
        try:
            is_full = self.handshakes is not None and not self.handshakes.has_room
            if is_full or self._num_in_turn > MAX_ACCEPTED_IN_TURN:
                raise BlockingIOError
            accepted = super().accept()
        except OSError:
            self._num_in_turn = 0
            raise
        if self.handshakes:
            self.handshakes.begin(accepted[0])
        return accepted


def port_of(listener: socket.socket) -> int:
    return int(listener.getsockname()[1])


def listen(host: str, port: int) -> Listener:
    """Raises `OSError` naming the address.

    Connections send small pieces at once, which asyncio sees to only for sockets that it opens itself: without, the
    first token would wait 40 ms for the client to acknowledge the status line.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)
        return Listener(listener)
    except OSError as error:
        raise OSError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
