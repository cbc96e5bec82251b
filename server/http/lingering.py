"""A transport that closes in stages, so that a response which was sent before its request was read is not lost.

If a connection is closed while bytes of a request are unread, TCP sends a reset, and the client may lose the response.
"""

import asyncio
from collections.abc import Callable
from typing import Any

LINGER_SECONDS = 10  # how long the rest of a request is read and discarded
LINGER_BYTES = 64 * 2**20  # how much of a request is read and discarded


class Lingering:
    """A transport whose `close` stops writing and waits for the client to close, if `must_linger` returns True.

    The protocol passes data that arrives while it waits to `discard`. A second `close` closes at once.
    """

    def __init__(self, transport: asyncio.Transport, must_linger: Callable[[], bool]) -> None:
        self._transport = transport
        self._must_linger = must_linger
        self._num_left: int | None = None
        """Bytes that may still be discarded. None before `close`."""
        self._end: asyncio.TimerHandle | None = None
        self.write = transport.write

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    @property
    def is_lingering(self) -> bool:
        return self._num_left is not None

    def is_closing(self) -> bool:
        return self.is_lingering or self._transport.is_closing()

    def close(self) -> None:
        if self.is_lingering or self._transport.is_closing() or not self._must_linger():
            self._transport.close()
            return
        self._num_left = LINGER_BYTES
        if self._transport.can_write_eof():  # not with TLS; there the client closes when it has read the response
            self._transport.write_eof()
        self._transport.resume_reading()
        self._end = asyncio.get_running_loop().call_later(LINGER_SECONDS, self._transport.abort)

    def forget(self) -> None:
        if self._end:
            self._end.cancel()

    def discard(self, data: bytes) -> None:
        assert self._num_left is not None
        self._num_left -= len(data)
        if self._num_left < 0:
            self._transport.close()
