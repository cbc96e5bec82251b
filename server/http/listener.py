"""The listening socket."""

import socket
from errno import EADDRINUSE

BACKLOG = 2048  # length of the accept queue

ACCEPTS_PER_TURN = 4
"""Connections accepted per turn of the event loop. Few, because closing others to make room takes some turns."""


class Listener(socket.socket):
    """Ignores the length of the queue that asyncio asks for, which is also its number of accepts per turn.

    asyncio would accept a whole burst in one turn. The burst could use up all descriptors before others are closed,
    and asyncio would then accept nothing for a second.
    """

    def listen(self, backlog: int = BACKLOG) -> None:
        super().listen(BACKLOG)


def listen(host: str, port: int) -> Listener:
    """Open a listening socket. Raise `OSError` with the address if that fails.

    Set TCP_NODELAY, which asyncio sets only on sockets that it opens itself. Without TCP_NODELAY, the first token waits
    40 ms for the client to acknowledge the status line.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)
        return Listener(fileno=listener.detach())
    except OSError as error:
        reason = (error.strerror or str(error)).partition(" (while attempting")[0]
        advice = "; choose another --port" if error.errno == EADDRINUSE else ""
        raise OSError(f"cannot listen on {host}:{port}: {reason}{advice}") from error
