"""The listening socket, which sheds connections when no file descriptor is left."""

import errno
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from server.http.handshakes import Handshakes
from server.settings import Settings
from server.telemetry.logs import SeldomLine

BACKLOG = 2048
"""Length of the accept queue."""

MAX_ACCEPTED_IN_TURN = 4
"""Connections accepted in a turn of the event loop. Some turns pass until one beyond the bound is closed again."""

EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Listener(socket.socket):
    """Accepts connections, a few at a time, then raises `BlockingIOError` once, as if no more were waiting.

    A burst accepted at once would take the descriptors of those beyond the bound before any of them can be refused, and
    then a probe might be shed. Shedding raises `BlockingIOError` too: left waiting, the connection would wake the event
    loop again and again. Closing it takes a descriptor, so one is kept spare.
    """

    def __init__(self, taken: socket.socket) -> None:
        super().__init__(fileno=taken.detach())
        self._spare: int | None = spare_descriptor()
        self.handshakes: Handshakes | None = None
        self._line = SeldomLine("no descriptors left for connections")
        self._num_in_turn = 0

    def accept(self) -> tuple[socket.socket, Any]:
        self._num_in_turn += 1
        try:
            is_full = self.handshakes is not None and not self.handshakes.has_room
            if is_full or self._num_in_turn > MAX_ACCEPTED_IN_TURN:
                raise BlockingIOError
            accepted = super().accept()
        except OSError as error:
            self._num_in_turn = 0
            if error.errno not in EXHAUSTED:
                raise
            self._shed()
            raise BlockingIOError from error
        if self.handshakes:
            self.handshakes.begin(accepted[0])
        return accepted

    def close(self) -> None:
        self._free_spare()
        super().close()

    def _shed(self) -> None:
        self._line.tell()
        self._free_spare()
        with suppress(OSError):
            super().accept()[0].close()
        with suppress(OSError):
            self._spare = spare_descriptor()

    def _free_spare(self) -> None:
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None


def spare_descriptor() -> int:
    return os.open(os.devnull, os.O_RDONLY)


@contextmanager
def listening(settings: Settings) -> Iterator[Listener]:
    """The listening socket, opened before the model is loaded. Raises `OSError` naming the address."""
    if settings.uds is None:
        with listen(settings.host, settings.port) as listener:
            yield listener
        return
    with listen_at(settings.uds) as listener:
        try:
            yield listener
        finally:
            settings.uds.unlink(missing_ok=True)


def port_of(listener: socket.socket) -> int:
    """The port; 0 for a Unix socket."""
    return 0 if listener.family == socket.AF_UNIX else int(listener.getsockname()[1])


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


def listen_at(path: Path) -> Listener:
    """A Unix socket; a stale one is replaced. Raises `OSError` naming the path."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if is_left_behind(path):
            path.unlink()
        made.bind(str(path))
        made.listen(BACKLOG)
    except OSError as error:
        made.close()
        raise OSError(f"cannot listen at {path}: {error.strerror or error}") from error
    return Listener(made)


def is_left_behind(path: Path) -> bool:
    if not path.exists() or not stat.S_ISSOCK(path.stat().st_mode):
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.setblocking(False)  # a server that hangs would keep this one waiting
        return asking.connect_ex(str(path)) == errno.ECONNREFUSED
