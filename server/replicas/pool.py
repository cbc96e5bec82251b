"""Where requests may go: replicas and the pool that chooses among them. Imports neither Ray nor an HTTP library."""

import random
from collections.abc import Collection, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, kw_only=True)
class Address:
    """A replica's name, its base URL, and the secret that its requests must carry."""

    name: str
    url: str
    secret: str = field(repr=False)


class NoReplica(Exception):
    """No replica is available."""


def by_load(loads: Mapping[str, int], excluded: Collection[str]) -> list[str]:
    """Return the names in order of their loads, without the excluded ones unless no others are left."""
    present = [name for name in loads if name not in excluded] or list(loads)
    return sorted(random.sample(present, len(present)), key=lambda name: loads[name])


class Pool(Protocol):
    def chosen(self, excluded: Collection[str]) -> AbstractAsyncContextManager[Address]:
        """Wait for a replica. Add the request to its load while the context is open.

        Prefer a replica that is not in `excluded`. Raise `NoReplica` if no replica will become available.
        """

    async def all(self) -> list[Address]:
        """Return all running replicas. Raise `NoReplica` if they cannot be listed."""
