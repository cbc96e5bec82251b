"""The listening socket, which sheds connections when no file descriptor is left."""

import errno
import os
import socket
from contextlib import suppress
from typing import Any

from server.telemetry.logs import SeldomLine

EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Listener(socket.socket):
    """Accepts connections. One that is shed raises `BlockingIOError`, as if none were waiting.

    Left waiting, it would wake the event loop again and again. Closing it takes a descriptor, so one is kept spare.
    """

    def __init__(self, taken: socket.socket) -> None:
        super().__init__(fileno=taken.detach())
        self._spare: int | None = spare_descriptor()
        self._line = SeldomLine("no descriptors left for connections")

    def accept(self) -> tuple[socket.socket, Any]:
        try:
            return super().accept()
        except OSError as error:
            if error.errno not in EXHAUSTED:
                raise
            self._shed()
            raise BlockingIOError from error

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
