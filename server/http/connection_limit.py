"""The limit on connections: the configured number, or fewer if file descriptors are short. Probes may use some more."""

import re
import resource
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from server.settings import SettingsError

RESERVE = 96
"""Descriptors reserved for files and excess connections. At most a quarter of the limit of open files is reserved."""

EXCESS_SHARE = 3
"""A third of the reserve is for excess connections."""

PROBE = re.compile(rb"(?:(?:GET|HEAD) /(?:livez|readyz|health)|OPTIONS /) HTTP/1\.")


class Refusable(Protocol):
    def refuse_as_too_many(self) -> None: ...


@dataclass(eq=False)
class ConnectionLimit:
    """Allows `num_connections` connections, and `num_excess` more that may only send probes."""

    num_connections: int
    num_excess: int = RESERVE // EXCESS_SHARE
    num_lingering: int = 0
    """Connections that were answered and are still read from. They share the places of excess connections."""
    _excess: OrderedDict[Refusable, bool] = field(default_factory=OrderedDict)
    """Excess connections, oldest first. The value is whether the connection's last request is a probe."""

    def add_excess(self, connection: Refusable) -> None:
        """Add an excess connection. If there are too many, refuse the oldest that has sent no probe."""
        self._excess[connection] = False
        if len(self._excess) > self.num_excess:
            oldest = next(excess for excess, has_probe in self._excess.items() if not has_probe)
            oldest.refuse_as_too_many()

    @property
    def may_linger(self) -> bool:
        return self.num_lingering + len(self._excess) < self.num_excess

    def is_excess(self, connection: Refusable) -> bool:
        return connection in self._excess

    def admits(self, connection: Refusable, data: bytes) -> bool:
        """Return whether an excess connection may stay open: `data` must be a probe."""
        self._excess[connection] = PROBE.match(data) is not None
        return self._excess[connection]

    def release(self, connection: Refusable) -> None:
        self._excess.pop(connection, None)


def connection_limit(max_connections: int, descriptors_per_connection: int = 1) -> ConnectionLimit:
    """Return `max_connections`, or fewer if descriptors are short. Raise `SettingsError` if none are left."""
    max_files = raised_limit()
    if max_files == resource.RLIM_INFINITY:
        return ConnectionLimit(max_connections)
    reserve = min(RESERVE, max_files // 4)
    possible = (max_files - num_descriptors() - reserve) // descriptors_per_connection
    if possible < 1:
        raise SettingsError(f"max_connections: a limit of {max_files} open files leaves no room for connections")
    return ConnectionLimit(min(max_connections, possible), max(1, reserve // EXCESS_SHARE))


def raised_limit() -> int:
    """Raise the soft limit of open files to the hard limit. Return the new limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(OSError, ValueError):  # some systems refuse even the hard limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            return hard
    return soft


def num_descriptors() -> int:
    return len(list(Path("/dev/fd").iterdir()))
