"""Injects faults into servers under mixed load, and measures the outcomes of requests and the time to recovery."""

import asyncio
import os
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from tests.faults.kinds import Kind
from tests.faults.load import OPTIONS, Known, Load, Spoken, all_right, known_requests, quiet_answers
from tests.server.forked_server import forked_server
from tests.server.raw_client import asked, request
from tests.server.server_process import ServerProcess

NUM_KNOWN = 12
NUM_CLIENTS = 4
BEFORE_SECONDS, AFTER_SECONDS = 1.5, 1.5
"""Duration of the load before and after a fault."""

END_SECONDS = 45
RECOVERY_SECONDS = 120


@dataclass
class Row:
    """Outcomes of a fault.

    `lost` requests got an incomplete response or none. `dropped` requests lost their connection before the response.
    `refused` and `failed` requests got an error. `recovery_seconds` is the longest time from the end of a fault to the
    first right response, from a new process if the server ended. `seconds` is the total duration.
    """

    what: str
    times: int = 0
    right: int = 0
    wrong: int = 0
    lost: int = 0
    dropped: int = 0
    failed: int = 0
    refused: int = 0
    recovery_seconds: float = 0.0
    exit_codes: str = ""
    seconds: float = 0.0

    def add(self, counts: Mapping[str, int], afterwards: Sequence[str], recovery: float) -> None:
        self.times += 1
        for name in ("right", "wrong", "dropped", "failed", "refused"):
            setattr(self, name, getattr(self, name) + counts.get(name, 0))
        self.lost += counts.get("cut", 0) + counts.get("unanswered", 0)
        self.wrong += sum(outcome != "right" for outcome in afterwards)
        self.recovery_seconds = max(self.recovery_seconds, round(recovery, 2))


class Suite:
    """Injects faults into servers of one model. `expected` are the tokens of an idle server."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder = folder
        self._known = known_requests(NUM_KNOWN, Random(seed))
        self._seed = seed
        self.expected: dict[Known, Spoken] = {}

    async def prepare(self) -> None:
        with forked_server(self._folder, Path(os.devnull), **OPTIONS) as server:
            self.expected = await quiet_answers(server.url, self._known)

    async def inject(self, kind: Kind, times: int) -> Row:
        row, codes, started = Row(kind.name), Counter[str](), time.monotonic()
        for turn in range(times):
            codes[await self._inject(kind, Random(f"{self._seed} {kind.name} {turn}"), row)] += 1
        row.exit_codes = ", ".join(f"{code} ({number})" for code, number in sorted(codes.items()))
        row.seconds = round(time.monotonic() - started, 1)
        return row

    async def _inject(self, kind: Kind, chance: Random, row: Row) -> str:
        async with AsyncExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            log = await stack.enter_async_context(kind.log(folder)) if kind.log else folder / "log"
            start = partial(kind.start, self._folder, **OPTIONS)
            server = stack.enter_context(start(log, prepare=kind.prepare))
            load = Load(self.expected, chance.randrange(2**31))
            running = asyncio.create_task(load.run(server.url, NUM_CLIENTS))
            await asyncio.sleep(BEFORE_SECONDS)
            await kind.inject(server, chance)
            over = time.monotonic()
            must_end = kind.ends and not kind.may_live
            code = await (asyncio.to_thread(server.exit_code, END_SECONDS) if must_end else settled(server))
            await asyncio.sleep(AFTER_SECONDS)
            load.is_over = True
            await running
            assert is_expected(code, kind, server), f"{kind.name}: {code}"
            assert code is not None or kind.had_effect(server), f"{kind.name}: had no effect"
            if code is not None:
                server = stack.enter_context(start(folder / "log-2"))
            afterwards, recovery = await self._recovered(server, over)
            row.add(load.counts, afterwards, recovery)
            return "lives" if code is None else str(code)

    async def _recovered(self, server: ServerProcess, since: float) -> tuple[list[str], float]:
        """Wait for a right response. Return the outcomes of all known requests, and the seconds since the fault."""
        first = dict([next(iter(self.expected.items()))])
        async with asyncio.timeout(RECOVERY_SECONDS):
            while await all_right(server.url, first) != ["right"]:  # noqa: ASYNC110 (the server is another process)
                await asyncio.sleep(0.1)
            recovery = time.monotonic() - since
            return await all_right(server.url, self.expected), recovery


def is_expected(code: int | None, kind: Kind, server: ServerProcess) -> bool:
    if code is None:
        return not kind.ends or kind.may_live
    return code in kind.ends or (code == -signal.SIGABRT and bool(kind.aborts) and kind.aborts in server.log())


def is_as_promised(row: Row, kind: Kind) -> bool:
    """No response is wrong. None is lost unless a process is killed, and none is dropped unless a process ends."""
    ends = bool(kind.ends) or kind.may_lose
    return row.wrong == 0 and (row.lost == 0 or kind.may_lose) and (row.dropped == 0 or ends)


async def settled(server: ServerProcess) -> int | None:
    """Wait until the server is live (None) or has ended (its exit code)."""
    until = time.monotonic() + END_SECONDS
    while server.process.poll() is None:
        with suppress(OSError, EOFError):
            if (await asked(server.url, request("/livez", method="GET"))).status == 200:
                return None
        assert time.monotonic() < until, "the server is neither live nor has it ended"
        await asyncio.sleep(0.2)
    return server.process.poll()


def table(rows: Sequence[Any]) -> str:
    """Format dataclasses as a Markdown table."""
    names = [name.replace("_", " ") for name in asdict(rows[0])]
    lines = [names, ["---"] * len(names), *([str(value) for value in asdict(row).values()] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"
