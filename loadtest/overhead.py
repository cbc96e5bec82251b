"""What serving costs: streaming tokens per second beside the engine alone, `python -m loadtest.overhead`, or beside
other servers, `python -m loadtest.overhead NAME,URL,PID …`.

Contenders take turns and never run at once. The engine alone is `nvium bench throughput`; the server must have the same
model and as many threads. With a process id (Linux) also a token's processor time: of the process and its descendants,
of the process alone, and of its first thread, which is the event loop.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from loadtest.bare_client import num_streamed
from loadtest.client import ServerError

PROMPT = "Once upon a time there was a"
"""The prompt of `nvium bench`."""

ENGINE = "engine"
ENGINE_REPEATS = 5
"""The median of these runs counts: during the first, schedules are still being solved."""

PROC = Path("/proc")
CLOCKS = {"processor": "processor", "first_process": "of its first process", "event_loop": "of its event loop"}
"""Whose processor time is measured."""


@dataclass(frozen=True, slots=True)
class Server:
    name: str
    url: str
    pid: int | None = None

    @classmethod
    def parse(cls, text: str) -> "Server":
        """Of NAME,URL,PID. Raises `ValueError`."""
        name, url, pid = text.split(",")
        return cls(name, url, int(pid))


@dataclass(frozen=True, slots=True)
class Measured:
    """Tokens per second, and µs of processor time per token by clock, where known."""

    rate: float
    us_per_token: dict[str, float] = field(default_factory=dict)


Turn = Mapping[tuple[int, str], Measured]
"""By streams and contender."""


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(
        prog="loadtest.overhead", allow_abbrev=False, description="What serving costs, beside the engine alone."
    )
    add = options.add_argument
    add("servers", type=Server.parse, nargs="*", metavar="NAME,URL,PID", help="compare these with the first of them")
    add("--base-url", default="http://127.0.0.1:8000", help="without /v1; compare this server with the engine")
    add("--pid", type=int, metavar="PID", help="of that server: also tells processor time per token (Linux)")
    add("--streams", type=int, nargs="+", default=[1, 8, 32], metavar="N", help="how many at once")
    add("--tokens", type=int, default=128, metavar="N", help="per stream")
    add("--turns", type=int, default=5, metavar="N", help="that count; one before them warms up")
    add("--threads", type=int, default=1, metavar="N", help="the engine's; servers have their own")
    add("--json", type=Path, metavar="FILE", help="write the figures here too")
    return options


def engine_rates(streams: Sequence[int], num_tokens: int, num_threads: int) -> dict[int, float]:
    """Tokens per second of the engine in a process of its own, by number of streams."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "throughput.json"
        numbers = ",".join(map(str, streams))
        options = [f"--sequences={numbers}", f"--tokens={num_tokens}", f"--threads={num_threads}", f"--json={file}"]
        command = [sys.executable, "-m", "nvium_core.cli", "bench", "throughput", *options]
        subprocess.run([*command, f"--repeats={ENGINE_REPEATS}"], check=True, capture_output=True)  # noqa: S603 (ours)
        rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    return {row["sequences"]: row["tokens_per_second"] for row in rows}


async def served(server: Server, num_streams: int, num_tokens: int, seed: int) -> Measured:
    """Streams that start together."""
    fields = {"model": "default", "prompt": PROMPT, "max_tokens": num_tokens, "ignore_eos": True}
    bodies = [{**fields, "seed": seed + number} for number in range(num_streams)]
    pids = list(family(server.pid)) if server.pid else []
    started, before = time.perf_counter(), clocks(pids)
    try:
        num_received = await num_streamed(server.url, bodies)
    except (ServerError, OSError) as error:
        raise SystemExit(f"loadtest.overhead: {error}") from error
    seconds, after = time.perf_counter() - started, clocks(pids)
    return Measured(num_received / seconds, {name: 1e6 * (after[name] - before[name]) / num_received for name in after})


def family(pid: int) -> Iterator[int]:
    """A process and its descendants."""
    yield pid
    for thread in (PROC / str(pid) / "task").iterdir():
        for child in (thread / "children").read_text(encoding="ascii").split():
            yield from family(int(child))


def clocks(pids: Sequence[int]) -> dict[str, float]:
    """Processor seconds so far, by `CLOCKS`; nothing without processes."""
    if not pids:
        return {}
    nanoseconds, *_ = (PROC / f"{pids[0]}/task/{pids[0]}/schedstat").read_text(encoding="ascii").split()
    first = processor_seconds(pids[:1])
    return {
        "processor": first + processor_seconds(pids[1:]),
        "first_process": first,
        "event_loop": int(nanoseconds) / 1e9,
    }


def processor_seconds(pids: Iterable[int]) -> float:
    """User and system time of processes."""
    ticks = 0
    for pid in pids:
        fields = (PROC / str(pid) / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def take_turn(arguments: argparse.Namespace, number: int) -> Turn:
    """Every contender at every number of streams; every other turn in reverse order."""
    found: dict[tuple[int, str], Measured] = {}
    servers = arguments.servers or [None, Server("server", arguments.base_url, arguments.pid)]
    for server in servers[:: -1 if number % 2 else 1]:
        if server is None:
            rates = engine_rates(arguments.streams, arguments.tokens, arguments.threads)
            found |= {(streams, ENGINE): Measured(rate) for streams, rate in rates.items()}
        else:
            for streams in arguments.streams:
                coroutine = served(server, streams, arguments.tokens, number * streams)
                found[streams, server.name] = asyncio.run(coroutine)
    return found


def rows(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    _, *turns = (take_turn(arguments, number) for number in track(range(arguments.turns + 1), "turns", transient=True))
    names = [server.name for server in arguments.servers] or [ENGINE, "server"]
    return [row(turns, streams, name, names[0]) for streams in arguments.streams for name in names]


def row(turns: Sequence[Turn], streams: int, name: str, baseline: str) -> dict[str, Any]:
    """Medians over the turns."""
    found = [turn[streams, name] for turn in turns]
    shares = [turn[streams, name].rate / turn[streams, baseline].rate for turn in turns]
    return {
        "streams": streams,
        "server": name,
        "tokens_per_second": median(each.rate for each in found),
        "share": median(shares),
        "shares": shares,
        **{
            f"{clock}_us_per_token": median(each.us_per_token[clock] for each in found)
            for clock in found[0].us_per_token
        },
    }


def table(found: Sequence[dict[str, Any]]) -> Table:
    result = Table("streams", "server", "tokens/s", "share", *CLOCKS.values(), caption="Processor time in µs a token.")
    for each in found:
        costs = (each.get(f"{clock}_us_per_token") for clock in CLOCKS)
        shown = ("" if cost is None else f"{cost:.0f}" for cost in costs)
        rates = f"{each['tokens_per_second']:.0f}", f"{each['share']:.3f}"
        result.add_row(str(each["streams"]), each["server"], *rates, *shown)
    return result


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parser().parse_args(argv)
    found = rows(arguments)
    Console().print(table(found))
    if arguments.json:
        settings = {name: getattr(arguments, name) for name in ("tokens", "turns", "threads")}
        arguments.json.write_text(json.dumps({**settings, "rows": found}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
