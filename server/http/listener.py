"""The listening socket. It accepts a few connections at a time."""

import socket
from errno import EADDRINUSE
from typing import Any

BACKLOG = 2048  # length of the accept queue

MAX_ACCEPTS_PER_TURN = 4
"""Connections accepted per turn of the event loop. Few, because closing an excess connection takes some turns."""


class Listener(socket.socket):
    """Accepts `MAX_ACCEPTS_PER_TURN` connections, then raises `BlockingIOError` as if no more were waiting.

    asyncio would accept a whole burst in one turn. The burst could use up all descriptors before the server refuses a
    connection, and asyncio would then accept nothing for a second, not even a probe.
    """

    def __init__(self, listening: socket.socket) -> None:
        super().__init__(fileno=listening.detach())
        self._num_accepts = 0

    def accept(self) -> tuple[socket.socket, Any]:
        self._num_accepts += 1
        try:
            if self._num_accepts > MAX_ACCEPTS_PER_TURN:
                raise BlockingIOError
            return super().accept()
        except BlockingIOError:
            self._num_accepts = 0
            raise
        except OSError:  # asyncio logs it, waits a second, but before that tries again as often as the queue is long
            self._num_accepts = MAX_ACCEPTS_PER_TURN
            raise


def listen(host: str, port: int) -> Listener:
    """Open a listening socket. Raise `OSError` with the address if that fails.

    Set TCP_NODELAY, which asyncio sets only on sockets that it opens itself. Without TCP_NODELAY, the first token waits
    40 ms for the client to acknowledge the status line.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)
        return Listener(listener)
    except OSError as error:
        reason = (error.strerror or str(error)).partition(" (while attempting")[0]
        advice = "; choose another --port" if error.errno == EADDRINUSE else ""
        raise OSError(f"cannot listen on {host}:{port}: {reason}{advice}") from error
