"""`python -m tests.faults.hang --json FILE`: one of two replicas of Ray hangs under load, and goes on later or never.

It counts as excluded once the first request that takes longer than `SLOW_SECONDS` is answered, elsewhere, and as back,
or replaced, once both replicas have answered something more. Answers are compared with those of before.
"""

import argparse
import asyncio
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx

from tests.byte_model import NAME, load_byte_model
from tests.faults.load import KEY, OPTIONS, Known, Spoken, dumped, judged, known_requests, quiet_answers
from tests.server.live_server import wait_until
from tests.server.raw_client import connected
from tests.server.server_process import free_port

NUM_KNOWN, NUM_CLIENTS = 10, 4
HANG_SECONDS = 6
BEFORE_SECONDS, AFTER_SECONDS = 5, 10
BACK_SECONDS = 150
SLOW_SECONDS = 1.5
START_SECONDS = 240
COMPLETED = re.compile(
    r'^nvium_requests_total\{[^}]*outcome="completed"[^}]*replica="([^"]+)"[^}]*\} (\S+)$', re.MULTILINE
)


@dataclass(frozen=True)
class Row:
    """Seconds are from when it stopped, those until it is back from when it went on, if it does."""

    what: str
    requests: int
    right: int
    wrong: int
    failed: int
    refused: int
    lost: int
    delayed: int
    longest_seconds: float
    excluded_seconds: float
    back_seconds: float


@dataclass(frozen=True)
class Asked:
    began: float
    seconds: float
    outcome: str


class Asking:
    def __init__(self, url: str, expected: dict[Known, Spoken]) -> None:
        self._url, self._expected = url, expected
        self.asked: list[Asked] = []
        self.is_over = False

    async def client(self, chance: random.Random) -> None:
        while not self.is_over:
            known, began = chance.choice(list(self._expected)), time.monotonic()
            try:
                async with asyncio.timeout(120), connected(self._url) as connection:
                    answer = await connection.ask(known.data(stream=chance.random() < 0.5))
                outcome = judged(answer, self._expected[known])
            except (OSError, EOFError):
                outcome = "lost"
            self.asked.append(Asked(began, time.monotonic() - began, outcome))
            await asyncio.sleep(0.05)


@contextmanager
def serving(folder: Path) -> Iterator[tuple[str, int]]:
    """`nvium serve --replicas 2`: its address and its process."""
    port = free_port()
    options = {"model": folder / NAME, "port": port, "replicas": 2, "max_replicas": 2, **OPTIONS}
    environment = os.environ | {f"NVIUM_{name.upper()}": str(value) for name, value in options.items()}
    command = [sys.executable, "-m", "nvium_core.cli", "serve"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until(lambda: process.poll() is not None or len(completed(url)) == 2, seconds=START_SECONDS)
        assert process.poll() is None, (folder / "log").read_text()
        yield url, process.pid
    finally:
        process.terminate()
        process.wait(timeout=90)


def completed(url: str) -> dict[str, float]:
    """Requests that each replica has answered, as far as they say so."""
    try:
        page = httpx.get(f"{url}/metrics", headers={"authorization": f"Bearer {KEY}"}, timeout=30).text
    except httpx.TransportError:
        return {}
    counts = Counter[str]()
    for name, value in COMPLETED.findall(page):
        counts[name] += float(value)
    del counts["front"]
    return counts


def replicas_of(front: int) -> list[int]:
    """The processes of replicas that the front's Ray has started."""
    statuses = {int(entry.name): entry for entry in Path("/proc").iterdir() if entry.name.isdecimal()}
    found = []
    for pid, entry in statuses.items():
        try:
            if (entry / "cmdline").read_text().startswith("ray::ServeReplica:") and is_below(pid, front):
                found.append(pid)
        except OSError:  # it has ended meanwhile
            continue
    return found


def is_below(pid: int, ancestor: int) -> bool:
    while pid > 1 and pid != ancestor:
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return pid == ancestor


async def hung(url: str, front: int, expected: dict[Known, Spoken], *, goes_on: bool) -> Row:
    asking = Asking(url, expected)
    clients = [asyncio.create_task(asking.client(random.Random(number))) for number in range(NUM_CLIENTS)]
    await asyncio.sleep(BEFORE_SECONDS)
    pid, stopped = replicas_of(front)[0], time.monotonic()
    os.kill(pid, signal.SIGSTOP)
    if goes_on:
        await asyncio.sleep(HANG_SECONDS)
        os.kill(pid, signal.SIGCONT)
    since = time.monotonic() if goes_on else stopped
    back = await both_answer(url, since)
    await asyncio.sleep(AFTER_SECONDS)
    asking.is_over = True
    await asyncio.gather(*clients)
    return row(f"stops for {HANG_SECONDS} s" if goes_on else "stops for good", asking.asked, stopped, back)


async def both_answer(url: str, since: float) -> float:
    """Seconds until each of two replicas has answered more than it had at first."""
    first: dict[str, float] | None = None
    while time.monotonic() - since < BACK_SECONDS:
        now = await asyncio.to_thread(completed, url)
        if len(now) == 2:
            first = first or now
            if first.keys() == now.keys() and all(now[name] > first[name] for name in now):
                return round(time.monotonic() - since, 1)
            first = {name: first.get(name, value) for name, value in now.items()}
        await asyncio.sleep(0.3)
    raise TimeoutError("no second replica answers")


def row(what: str, asked: list[Asked], stopped: float, back: float) -> Row:
    during = [each for each in asked if each.began + each.seconds > stopped]
    slow = [each for each in during if each.seconds > SLOW_SECONDS]
    excluded = round(min((each.began + each.seconds - stopped for each in slow), default=0.0), 1)
    outcomes = Counter(each.outcome for each in during)
    counts = {name: outcomes[name] for name in ("right", "wrong", "failed", "refused", "lost")}
    longest = max(each.seconds for each in during)
    times = {
        "longest_seconds": round(longest, 1),
        "excluded_seconds": round(max(0.0, excluded), 1),
        "back_seconds": back,
    }
    return Row(what, len(during), **counts, delayed=len(slow), **times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        model = load_byte_model()
        model.model.save_pretrained(Path(name) / NAME)
        model.tokenizer.save_pretrained(Path(name) / NAME)
        with serving(Path(name)) as (url, front):
            expected = asyncio.run(quiet_answers(url, known_requests(NUM_KNOWN, random.Random(20))))
            rows = [asdict(asyncio.run(hung(url, front, expected, goes_on=goes_on))) for goes_on in (True, False)]
    told = dumped({"command": "python -m tests.faults.hang", "rows": rows})
    sys.stdout.write(told)
    if given.json:
        given.json.write_text(told)


if __name__ == "__main__":
    main()
