"""Room for connections: the configured number, as far as file descriptors allow, and a few more for probes."""

import re
import resource
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from server.settings import SettingsError

RESERVE = 96
"""Descriptors kept for files and for connections beyond the bound; at most a quarter of the limit."""

SHARE_BEYOND = 3
"""One in this many of the reserve is for connections beyond the bound."""

DESCRIPTORS_PRESUMED = 64
"""Assumed where the system does not tell how many are in use."""

OWN_DESCRIPTORS = Path("/proc/self/fd")
PROBE = re.compile(rb"(?:GET|HEAD) /(?:livez|readyz|health) HTTP/1\.")


class Refusable(Protocol):
    """A connection beyond the bound."""

    def refuse_as_too_many(self) -> None: ...


@dataclass(eq=False)
class Room:
    """For `num_connections`, and `num_beyond` more that are answered probes only."""

    num_connections: int
    num_beyond: int = RESERVE // SHARE_BEYOND
    _beyond: OrderedDict[Refusable, bool] = field(default_factory=OrderedDict)
    """Whether each is answering a probe."""

    def hold(self, connection: Refusable) -> None:
        """Accept one beyond the bound. If there are too many, the one that has been silent the longest is refused."""
        self._beyond[connection] = False
        if len(self._beyond) > self.num_beyond:
            silent = next(held for held, is_answered in self._beyond.items() if not is_answered)
            silent.refuse_as_too_many()

    def holds(self, connection: Refusable) -> bool:
        return connection in self._beyond

    def admits(self, connection: Refusable, data: bytes) -> bool:
        """Whether the request of a connection beyond the bound is a probe, which is answered."""
        self._beyond[connection] = PROBE.match(data) is not None
        return self._beyond[connection]

    def release(self, connection: Refusable) -> None:
        """The connection is closed, or counts as an ordinary one now."""
        self._beyond.pop(connection, None)


def room_for(wanted: int, descriptors_each: int = 1, count: Callable[[], int] | None = None) -> Room:
    """As many connections as are wanted and possible. Raises `SettingsError` if none is.

    `count` gives the number of descriptors in use.
    """
    limit = raised_limit()
    if limit == resource.RLIM_INFINITY:
        return Room(wanted)
    reserve = min(RESERVE, limit // 4)
    possible = (limit - (count or num_descriptors)() - reserve) // descriptors_each
    if possible < 1:
        raise SettingsError(f"max_connections: a limit of {limit} open files leaves no room for connections")
    return Room(min(wanted, possible), max(1, reserve // SHARE_BEYOND))


def raised_limit() -> int:
    """The limit of open files, after raising the soft limit to the hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(OSError, ValueError):  # the system has a lower bound of its own
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            return hard
    return soft


def num_descriptors() -> int:
    """Descriptors in use."""
    try:
        return len(list(OWN_DESCRIPTORS.iterdir()))
    except OSError:
        return DESCRIPTORS_PRESUMED
