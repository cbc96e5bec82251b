"""Mixed load of known requests. Each response is compared, token by token, with an idle server's."""

import asyncio
import random
from asyncio import IncompleteReadError
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from tests.server.raw_client import JSON, PATHS, STARTS, Answer, RawConnection, asked, connected, post

KEY = "sk-faults"

OPEN: Mapping[str, str] = {**JSON, "authorization": f"Bearer {KEY}"}
OPTIONS = {"deterministic": 1, "max_sequences": 8, "cache_tokens": 560, "api_keys": KEY, "arrival_seconds": 20}
"""Options of the server. The cache is so small that sequences are preempted."""

ANSWER_SECONDS = 60
PAUSE_SECONDS = 0.05

LONG_BEGINNING = "Once upon a time there was a fox. " * 12

Spoken = dict[int, list[tuple[int, int]]]

MALFORMED = (b"\x00\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", post(PATHS[0], {"prompt": 3}, headers=OPEN))
"""Requests that the server must refuse."""

REFUSALS = (400, 429, 503, 505)
UNFINISHED = b"POST / HTT"
LONG_PROMPT, NUM_LONG = 100_000, 16
"""Sentences per request, and concurrent requests: more than fits into memory that the allocator has kept."""


@dataclass(frozen=True, eq=False)
class Known:
    """A request with deterministic tokens."""

    path: str
    fields: Mapping[str, Any]

    def data(self, *, stream: bool) -> bytes:
        return post(self.path, {"model": "default", **self.fields, "stream": stream}, headers=OPEN)


def known_requests(number: int, chance: random.Random) -> list[Known]:
    return [Known(path := chance.choice(PATHS), {**STARTS[path], **some_fields(path, chance)}) for _ in range(number)]


def some_fields(path: str, chance: random.Random) -> dict[str, Any]:
    asked: dict[str, Any] = {"max_tokens": chance.randrange(2, 120), "seed": chance.randrange(2**31)}
    asked |= {"n": chance.choice([1, 1, 1, 2, 3]), "temperature": chance.choice([0, 0.7, 1])}
    if chance.random() < 0.3:
        asked["structured_outputs"] = {"regex": chance.choice(["[a-f]{3,40}", "(yes|no|maybe){2,9}"])}
    elif chance.random() < 0.5:
        asked["ignore_eos"] = True
    if path == PATHS[0] and chance.random() < 0.5:
        asked["prompt"] = LONG_BEGINNING[: chance.randrange(20, len(LONG_BEGINNING))]
    return asked


class Load:
    """Clients that send requests until `is_over`."""

    def __init__(self, expected: Mapping[Known, Spoken], seed: int) -> None:
        self._expected = expected
        self._known = list(expected)
        self._chance = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.is_over = False

    async def run(self, url: str, num_clients: int) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(num_clients):
                group.create_task(self._client(url, random.Random(self._chance.random())))

    async def _client(self, url: str, chance: random.Random) -> None:
        while not self.is_over:
            try:
                async with asyncio.timeout(ANSWER_SECONDS), connected(url) as connection:
                    await self._ask_or_be_cut(connection, chance)
            except TimeoutError:
                self.counts["unanswered"] += 1
            except OSError:
                self.counts["unreachable"] += 1
                await asyncio.sleep(0.5)
            await asyncio.sleep(PAUSE_SECONDS)

    async def _ask_or_be_cut(self, connection: RawConnection, chance: random.Random) -> None:
        """Count a response that ends early as `cut`, and a connection that ends before the response as `dropped`."""
        try:
            await self._ask(connection, chance)
        except TimeoutError:
            raise
        except (OSError, ValueError, IncompleteReadError) as error:
            is_silent = isinstance(error, IncompleteReadError) and not (error.partial or connection.has_heard)
            self.counts["dropped" if is_silent or isinstance(error, ConnectionResetError) else "cut"] += 1

    async def _ask(self, connection: RawConnection, chance: random.Random) -> None:
        if chance.random() < 0.02:
            await connection.send(UNFINISHED)
            self.counts["unfinished"] += 1
        elif chance.random() < 0.08:
            answer = await connection.ask(chance.choice(MALFORMED))
            self.counts["malformed" if answer.status in REFUSALS else "failed"] += 1
        elif chance.random() < 0.15:
            await connection.send(chance.choice(self._known).data(stream=True))
            await asyncio.sleep(chance.random() / 5)
            self.counts["left"] += 1
        else:
            known = chance.choice(self._known)
            answer = await connection.ask(known.data(stream=chance.random() < 0.5))
            self.counts[judged(answer, self._expected[known])] += 1


def judged(answer: Answer, expected: Spoken) -> str:
    """Return `right`, `wrong`, `refused` (may be retried) or `failed` (with an error)."""
    if answer.status in (429, 503):
        return "refused"
    if answer.status != 200 or b'"error"' in answer.body:
        return "failed"
    return "right" if answer.spoken() == expected else "wrong"


async def ask_for_much(url: str) -> None:
    """Send requests that need much memory. Ignore the responses."""
    long = post(PATHS[0], {"model": "default", "prompt": "Once upon a time. " * LONG_PROMPT}, headers=OPEN)
    with suppress(TimeoutError):
        async with asyncio.timeout(2):
            await asyncio.gather(*(asked(url, long) for _ in range(NUM_LONG)), return_exceptions=True)


async def quiet_answers(url: str, known: Sequence[Known]) -> dict[Known, Spoken]:
    """Send the requests one at a time and return the tokens of each response."""
    answers: dict[Known, Spoken] = {}
    for each in known:
        answer = await asked(url, each.data(stream=False))
        assert answer.status == 200, answer.body
        answers[each] = answer.spoken()
    return answers


async def all_right(url: str, expected: Mapping[Known, Spoken]) -> list[str]:
    """Send all known requests and return the outcomes."""
    return [judged(await asked(url, known.data(stream=True)), spoken) for known, spoken in expected.items()]
