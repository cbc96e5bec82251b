"""Chooses a replica for each request. Imports neither Ray nor an HTTP library.

Prompt prefixes are stored as digests of the text, one per `BLOCK_CHARACTERS`, so the gateway needs no tokenizer. A
replica may no longer have a prefix that is stored for it. A request sent there misses the cache, with no other harm.
"""

import json
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Protocol

BLOCK_CHARACTERS = 64
"""Characters per digest. A cache page holds about as much text."""

MAX_BLOCKS = 128
"""Maximum prefix length, in blocks."""

MAX_AHEAD = 4
"""A replica is overloaded if it has more than this many requests above the least loaded replica."""

MAX_DIGESTS = 100_000


def prefix_digests(body: bytes) -> list[bytes]:
    """Return digests of a prompt's prefixes, shortest first. If the prompt is short or missing, return none."""
    try:
        request = json.loads(body)
    except (ValueError, RecursionError):
        return []
    text = prompt_text(request) if isinstance(request, dict) else ""
    digest, found = blake2b(digest_size=16), []
    for end in range(BLOCK_CHARACTERS, min(len(text), BLOCK_CHARACTERS * MAX_BLOCKS) + 1, BLOCK_CHARACTERS):
        digest.update(text[end - BLOCK_CHARACTERS : end].encode(errors="surrogatepass"))
        found.append(digest.digest())
    return found


def prompt_text(request: Mapping[str, Any]) -> str:
    """Return a request's prompt as text. Prompts with a common prefix yield texts with a common prefix.

    Of several prompts, only the first counts.
    """
    prompt = request.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, list):
        prompt = " ".join(map(str, prompt[: BLOCK_CHARACTERS * MAX_BLOCKS]))
    return prompt if isinstance(prompt, str) else json.dumps([request.get("tools"), request.get("messages")])


class PrefixHolders:
    """Maps each prefix digest to the replica that last received it. Keeps the latest `capacity` digests."""

    def __init__(self, capacity: int = MAX_DIGESTS) -> None:
        self._capacity = capacity
        self.by_digest: OrderedDict[bytes, str] = OrderedDict()

    def note(self, digests: Iterable[bytes], replica: str) -> None:
        for digest in digests:
            self.by_digest[digest] = replica
            self.by_digest.move_to_end(digest)
        while len(self.by_digest) > self._capacity:
            self.by_digest.popitem(last=False)


def preferred(digests: Sequence[bytes], holders: Mapping[bytes, str], loads: Mapping[str, int]) -> str:
    """Return the replica with the longest cached prefix, unless it is overloaded; else the least loaded replica.

    `loads` maps each replica to its number of requests. The first of equally loaded replicas is chosen.
    """
    bound = min(loads.values()) + MAX_AHEAD
    for digest in reversed(digests):
        if (holder := holders.get(digest, "")) in loads and loads[holder] <= bound:
            return holder
    return min(loads, key=loads.__getitem__)


@dataclass(frozen=True, kw_only=True)
class Address:
    """A replica's name, its base URL, and the secret that its requests must carry."""

    name: str
    url: str
    secret: str = field(repr=False)


class NoReplica(Exception):
    """No replica is available."""


class Pool(Protocol):
    def chosen(self, digests: Sequence[bytes], excluded: Collection[str]) -> AbstractAsyncContextManager[Address]:
        """Wait for a replica. Add the request to its load while the context is open.

        Prefer a replica that is not in `excluded`. Raise `NoReplica` if no replica will become available.
        """

    async def all(self) -> list[Address]:
        """Return all running replicas. Raise `NoReplica` if they cannot be listed."""
