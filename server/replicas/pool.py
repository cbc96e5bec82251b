"""Where requests may go: replicas and the pool that chooses among them. Imports neither Ray nor an HTTP library."""

from collections.abc import Collection
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


class Pool(Protocol):
    def chosen(self, excluded: Collection[str]) -> AbstractAsyncContextManager[Address]:
        """Wait for a replica. Add the request to its load while the context is open.

        Prefer a replica that is not in `excluded`. Raise `NoReplica` if no replica will become available.
        """

    async def all(self) -> list[Address]:
        """Return all running replicas. Raise `NoReplica` if they cannot be listed."""
