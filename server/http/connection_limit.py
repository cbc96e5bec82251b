"""The limit on connections: the configured number, or fewer if file descriptors are short. Probes may use some more."""

import re
import resource
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from server.settings import SettingsError

RESERVE = 128  # descriptors reserved for files, pipes to helpers, and excess connections

PROBE = re.compile(rb"(?:(?:GET|HEAD) /(?:livez|readyz|health)|OPTIONS /) HTTP/1\.")


class Refusable(Protocol):
    def refuse_as_too_many(self) -> None: ...


@dataclass(eq=False)
class ConnectionLimit:
    """Allows `num_connections` connections, and `num_excess` more that may only send probes."""

    num_connections: int
    num_excess: int = RESERVE // 4
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
    """Raise the limit of open files. Return `max_connections`, or as many as fit. Raise `SettingsError` if none do."""
    max_files, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # some systems refuse even the hard limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        max_files = hard
    if max_files == resource.RLIM_INFINITY:
        return ConnectionLimit(max_connections)
    if (possible := (max_files - RESERVE) // descriptors_per_connection) < 1:
        raise SettingsError(f"max_connections: a limit of {max_files} open files leaves no room for connections")
    return ConnectionLimit(min(max_connections, possible))
