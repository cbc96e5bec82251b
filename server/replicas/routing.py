"""Which replica a request goes to, and how many there should be. Needs neither Ray nor HTTP.

Prefixes are remembered as digests of the text, one per `BLOCK_CHARACTERS`, so no tokenizer is needed. An outdated
entry, because the page was evicted or the replica is gone, only costs the hit.
"""

import json
import math
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

BLOCK_CHARACTERS = 64
"""About one cache page."""

MAX_BLOCKS = 128
"""Longer prefixes are not distinguished."""

MAX_AHEAD = 4
"""Requests by which a preferred replica may be busier than the idlest."""

MAX_REMEMBERED = 100_000
"""Prefixes remembered, the latest ones."""


def beginnings(body: bytes) -> list[bytes]:
    """Digests of the prefixes of a request's prompt, shortest first; none if it is short or missing."""
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError):
        return []
    text = opening(asked) if isinstance(asked, dict) else ""
    digest, found = blake2b(digest_size=16), []
    for end in range(BLOCK_CHARACTERS, min(len(text), BLOCK_CHARACTERS * MAX_BLOCKS) + 1, BLOCK_CHARACTERS):
        digest.update(text[end - BLOCK_CHARACTERS : end].encode(errors="surrogatepass"))
        found.append(digest.digest())
    return found


def opening(asked: Mapping[str, Any]) -> str:
    """The beginning of a request's prompt as text; equal for two prompts as far as they are."""
    prompt = asked.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, list):
        prompt = " ".join(map(str, prompt[: BLOCK_CHARACTERS * MAX_BLOCKS]))
    return prompt if isinstance(prompt, str) else json.dumps([asked.get("tools"), asked.get("messages")])


class PrefixHolders:
    """The replica that each prefix was last sent to."""

    def __init__(self, capacity: int = MAX_REMEMBERED) -> None:
        self._capacity = capacity
        self._holders: OrderedDict[bytes, str] = OrderedDict()

    def note(self, beginnings: Iterable[bytes], replica: str) -> None:
        for beginning in beginnings:
            self._holders[beginning] = replica
            self._holders.move_to_end(beginning)
        while len(self._holders) > self._capacity:
            self._holders.popitem(last=False)

    @property
    def by_prefix(self) -> Mapping[bytes, str]:
        return self._holders


def preferred(beginnings: Sequence[bytes], holders: Mapping[bytes, str], loads: Mapping[str, int]) -> str:
    """The replica with the longest prefix that is not much busier than the idlest; else the idlest.

    `loads` are the requests of each replica; of equally idle ones the first is taken.
    """
    bound = min(loads.values()) + MAX_AHEAD
    for beginning in reversed(beginnings):
        if (holder := holders.get(beginning, "")) in loads and loads[holder] <= bound:
            return holder
    return min(loads, key=loads.__getitem__)


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
        """The replica for a request with these prefixes (`beginnings`), which counts in its load meanwhile.

        Not an excluded one, unless there is no other. Waits for one. Raises `NoReplica` if there will be none.
        """

    async def all(self) -> list[Address]:
        """The replicas that serve now."""


SEQUENCES = "sequences"
"""The statistic in which a replica reports its sequences, running and waiting."""


class BySequences:
    """Ray's autoscaling policy; Ray applies bounds and delays."""

    def __init__(self, sequences_per_replica: int) -> None:
        self._sequences_per_replica = sequences_per_replica

    def __call__(self, context: "AutoscalingContext") -> tuple[int, dict[str, Any]]:
        counts = (context.aggregated_metrics or {}).get(SEQUENCES, {})
        return math.ceil(sum(counts.values()) / self._sequences_per_replica), {}
