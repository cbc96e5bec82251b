"""What a hostile client does to another client's stream: `python -m loadtest.hostile --base-url … --json FILE`.

Runs one attack after another. Reports for each how it was answered and how long it took, and for a stream beside it,
read by another process, the median and the worst gap between tokens and the worst time to first token, before and
during the attack. With a file of two keys attacker and neighbour are two clients, else the server sees one.

Exit codes: 0 every attack was answered fairly and in time, 1 not every one.
"""

import argparse
import asyncio
import json
import multiprocessing
import resource
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console
from rich.table import Table

from loadtest.attacks import ATTACKS, Attack, Statuses, Target, asking

UNANSWERED = -1
STARTING_SECONDS = 2.0
BEFORE_SECONDS = 3.0
AFTER_SECONDS = 0.5
LONG = {"stream": True, "ignore_eos": True, "temperature": 1, "prompt": "Once upon a time"}
SAMPLING_SECONDS = 0.05
MAX_SILENCE_SECONDS = 60


@dataclass(frozen=True)
class Pace:
    """Of a stream, in milliseconds; None where nothing was measured."""

    median_gap_ms: float | None
    worst_gap_ms: float | None
    worst_first_token_ms: float | None


Moments = list[tuple[float, float]]
"""(when it ended, duration), in seconds."""


@dataclass
class Neighbour:
    """Streams one answer after another and records when tokens came."""

    target: Target
    max_tokens: int
    gaps: Moments = field(default_factory=list)
    first_tokens: Moments = field(default_factory=list)
    num_failed: int = 0
    asked_at: float = 0.0
    last: float | None = None

    def run(self, is_over: Event | threading.Event) -> None:
        data = self.target.post(asking(**LONG, max_tokens=self.max_tokens))
        while not is_over.is_set():
            try:
                self._stream(data, is_over)
            except OSError:
                self.num_failed += 1
                time.sleep(SAMPLING_SECONDS)

    def _stream(self, data: bytes, is_over: Event | threading.Event) -> None:
        self.asked_at, self.last = time.monotonic(), None
        address = self.target.host, self.target.port
        with socket.create_connection(address, timeout=MAX_SILENCE_SECONDS) as connection:
            connection.sendall(data)
            with connection.makefile("rb") as answer:
                self.num_failed += b" 200 " not in answer.readline()
                for line in answer:
                    if line.startswith(b'data: {"id"'):
                        self._note(time.monotonic())
                    if is_over.is_set():
                        break

    def _note(self, now: float) -> None:
        if self.last is None:
            self.first_tokens.append((now, now - self.asked_at))
        else:
            self.gaps.append((now, now - self.last))
        self.last = now

    def pace(self, since: float, until: float) -> Pace:
        """Of gaps and waits that ended in this interval."""
        gaps = [gap for end, gap in self.gaps if since <= end <= until]
        waits = [wait for end, wait in self.first_tokens if since <= end <= until]
        return Pace(
            median_gap_ms=milliseconds(median(gaps) if gaps else None),
            worst_gap_ms=milliseconds(max(gaps, default=None)),
            worst_first_token_ms=milliseconds(max(waits, default=None)),
        )


def stream_beside(neighbour: Neighbour, is_over: Event, told: Connection) -> None:
    """In a process of its own, so that the attack's client does not slow it down."""
    neighbour.run(is_over)
    told.send(neighbour)


@contextmanager
def beside(neighbour: Neighbour) -> Iterator[list[Neighbour]]:
    """Streams meanwhile. At the end the list holds the neighbour with its records."""
    spawn, noted = multiprocessing.get_context("spawn"), list[Neighbour]()
    is_over, (here, there) = spawn.Event(), spawn.Pipe(duplex=False)
    process = spawn.Process(target=stream_beside, args=(neighbour, is_over, there), daemon=True)
    process.start()
    try:
        yield noted
    finally:
        is_over.set()
        noted.append(here.recv())
        process.join()


@dataclass(frozen=True)
class AttackResult:
    attack: str
    statuses: dict[str, int]
    is_fair: bool
    seconds: float
    before: Pace
    during: Pace
    num_failed_beside: int
    grown_mb: float | None


def milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(1000 * seconds, 1)


def anonymous_mb(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon:"))


async def peak_mb(pid: int, peaks: list[float]) -> None:
    while True:
        peaks.append(anonymous_mb(pid))
        await asyncio.sleep(SAMPLING_SECONDS)


async def tried(attack: Attack, target: Target, patience: float) -> Statuses:
    try:
        async with asyncio.timeout(patience):
            return await attack.work(target)
    except TimeoutError:
        return Statuses({UNANSWERED: 1})


async def measure(
    attack: Attack, target: Target, neighbour: Neighbour, patience: float, pid: int | None
) -> AttackResult:
    peaks = [anonymous_mb(pid)] if pid else []
    with beside(neighbour) as noted:
        await asyncio.sleep(STARTING_SECONDS)
        calm = time.monotonic()
        await asyncio.sleep(BEFORE_SECONDS)
        sampling = asyncio.create_task(peak_mb(pid, peaks)) if pid else None
        started = time.monotonic()
        statuses = await tried(attack, target, patience)
        ended = time.monotonic()
        await asyncio.sleep(AFTER_SECONDS)
        if sampling:
            sampling.cancel()
    return AttackResult(
        attack=attack.name,
        statuses={name_of(status): number for status, number in sorted(statuses.items())},
        is_fair=set(statuses) <= attack.fair,
        seconds=round(ended - started, 3),
        before=noted[0].pace(calm, started),
        during=noted[0].pace(started, ended + AFTER_SECONDS),
        num_failed_beside=noted[0].num_failed,
        grown_mb=round(max(peaks) - peaks[0], 1) if peaks else None,
    )


def name_of(status: int) -> str:
    return {UNANSWERED: "unanswered", 0: "closed"}.get(status, str(status))


def table(results: Sequence[AttackResult]) -> Table:
    result = Table("attack", "answered", "seconds", "gap before, ms", "gap during, ms", "first token, ms", "memory, MB")
    for each in results:
        answered = ", ".join(f"{status} × {number}" for status, number in each.statuses.items())
        gaps = [f"{pace.median_gap_ms} / {pace.worst_gap_ms}" for pace in (each.before, each.during)]
        waits = f"{each.before.worst_first_token_ms} / {each.during.worst_first_token_ms}"
        fair = answered if each.is_fair else f"UNFAIR: {answered}"
        result.add_row(each.attack, fair, f"{each.seconds:.2f}", *gaps, waits, str(each.grown_mb))
    return result


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(prog="loadtest.hostile", allow_abbrev=False, description="A hostile client.")
    add = options.add_argument
    add("--base-url", default="http://127.0.0.1:8000", help="without /v1; a server of your own")
    add("--keys-file", type=Path, metavar="FILE", help="two lines: the attacker's key and the neighbour's")
    add("--only", default="", metavar="TEXT", help="attacks whose names have this in them")
    add("--tokens", type=int, default=900, metavar="N", help="of each answer beside (900)")
    add("--patience", type=float, default=120.0, metavar="SECONDS", help="for each attack (120)")
    add("--pid", type=int, metavar="PID", help="of the server: also tells how much memory it takes (Linux)")
    add("--json", type=Path, metavar="FILE", help="write the figures here too")
    return options


def targets(arguments: argparse.Namespace) -> tuple[Target, Target]:
    """The attacker's and the neighbour's."""
    address = urlsplit(arguments.base_url)
    open_to_all = Target(address.hostname or "127.0.0.1", address.port or 80)
    if not arguments.keys_file:
        return open_to_all, open_to_all
    attacker, neighbour = arguments.keys_file.read_text(encoding="utf-8").split()
    return replace(open_to_all, key=attacker), replace(open_to_all, key=neighbour)


def allow_many_connections() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


async def run(arguments: argparse.Namespace, console: Console) -> list[AttackResult]:
    attacker, neighbour = targets(arguments)
    results = []
    for attack in ATTACKS:
        if arguments.only in attack.name:
            console.print(attack.name)
            streaming = Neighbour(neighbour, arguments.tokens)
            results.append(await measure(attack, attacker, streaming, arguments.patience, arguments.pid))
    return results


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    allow_many_connections()
    results = asyncio.run(run(arguments, Console(stderr=True)))
    Console(width=200).print(table(results))
    if arguments.json:
        rows: list[dict[str, Any]] = [asdict(result) for result in results]
        arguments.json.write_text(json.dumps({"attacks": rows}, indent=1) + "\n", encoding="utf-8")
    return int(not all(result.is_fair for result in results))


if __name__ == "__main__":
    sys.exit(main())
