"""The interface of a set of replicas. Knows no Ray and no HTTP."""

from collections.abc import Collection, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, kw_only=True)
class Address:
    """A replica's name, base URL, and the secret that it requires."""

    name: str
    url: str
    secret: str = field(repr=False)


class NoReplica(Exception):
    """There is no replica at the moment."""


class Pool(Protocol):
    def chosen(self, beginnings: Sequence[bytes], excluded: Collection[str]) -> AbstractAsyncContextManager[Address]:
        """The replica for a request with these prefixes (`affinity.beginnings`), which counts in its load meanwhile.

        Not an excluded one, unless there is no other. Waits for one. Raises `NoReplica` if there will be none.
        """

    async def all(self) -> list[Address]:
        """The replicas that serve now."""
