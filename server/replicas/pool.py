"""Where replicas are to be found, whoever keeps them. Knows no Ray and no HTTP."""

from collections.abc import Collection, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, kw_only=True)
class Address:
    """A replica: its name, the beginning of its URLs, and what a request must show to be answered there."""

    name: str
    url: str
    secret: str = field(repr=False)


class NoReplica(Exception):
    """There is none at the moment."""


class Pool(Protocol):
    def chosen(self, beginnings: Sequence[bytes], excluded: Collection[str]) -> AbstractAsyncContextManager[Address]:
        """The replica for a request that begins so (`affinity.beginnings`), which counts as busy with it meanwhile.

        None of the excluded, unless there is no other. Waits for one. Raises `NoReplica` if there will be none.
        """

    async def all(self) -> list[Address]:
        """Those that serve now."""
