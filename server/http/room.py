"""Room for connections: as many as are allowed, as far as there are file descriptors, and a few more for probes."""

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
"""Descriptors kept for files and for connections beyond the bound; of a low limit a quarter."""

SHARE_BEYOND = 3
"""One in so many of the reserve is for connections beyond the bound."""

DESCRIPTORS_PRESUMED = 64
"""In use at the start, where the system does not tell."""

OWN_DESCRIPTORS = Path("/proc/self/fd")
PROBE = re.compile(rb"(?:GET|HEAD) /(?:livez|readyz|health) HTTP/1\.")


class Refusable(Protocol):
    """A connection beyond the bound."""

    def refuse_as_too_many(self) -> None: ...


@dataclass(eq=False)
class Room:
    """For `num_connections`, and `num_beyond` more that may ask for a probe's answer and nothing else."""

    num_connections: int
    num_beyond: int = RESERVE // SHARE_BEYOND
    _beyond: OrderedDict[Refusable, bool] = field(default_factory=OrderedDict)
    """Whether each is being answered."""

    def hold(self, connection: Refusable) -> None:
        """Take one in beyond the bound. The one that has been silent for the longest time makes way if need be."""
        self._beyond[connection] = False
        if len(self._beyond) > self.num_beyond:
            silent = next(held for held, is_answered in self._beyond.items() if not is_answered)
            silent.refuse_as_too_many()

    def holds(self, connection: Refusable) -> bool:
        return connection in self._beyond

    def admits(self, connection: Refusable, data: bytes) -> bool:
        """Whether what one of those beyond the bound says is answered."""
        self._beyond[connection] = PROBE.match(data) is not None
        return self._beyond[connection]

    def release(self, connection: Refusable) -> None:
        """It has gone, or is one of the others now."""
        self._beyond.pop(connection, None)


def room_for(wanted: int, descriptors_each: int = 1, count: Callable[[], int] | None = None) -> Room:
    """As many connections as are wanted and can be had. Raises `SettingsError` if there is room for none.

    `count` tells how many descriptors are in use.
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
    """How many files may be open, once that is as many as this process may allow itself."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(OSError, ValueError):  # as where the system has a bound of its own
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            return hard
    return soft


def num_descriptors() -> int:
    """In use now."""
    try:
        return len(list(OWN_DESCRIPTORS.iterdir()))
    except OSError:
        return DESCRIPTORS_PRESUMED
