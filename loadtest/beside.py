"""What one server costs beside another: tokens per second and processor time per token, `python -m loadtest.beside`.

The servers run all the time and are asked in turns, never two at once. Processor time is that of a server's process and
of all that it has started, so it tells what a token costs on a machine that has other things to do too. Linux only.
"""

import argparse
import asyncio
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.progress import track
from rich.table import Table

from loadtest.overhead import served, tell

PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class Server:
    """Its process is that which was started."""

    name: str
    url: str
    pid: int


def server(text: str) -> Server:
    """From NAME,URL,PID. Raises `ValueError`."""
    name, url, pid = text.split(",")
    return Server(name, url, int(pid))


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(
        prog="loadtest.beside", allow_abbrev=False, description="What one server costs beside another."
    )
    add = options.add_argument
    add("servers", type=server, nargs="+", metavar="NAME,URL,PID", help="the first is what others are compared with")
    add("--streams", type=int, nargs="+", default=[1, 8, 32], metavar="N", help="how many at once")
    add("--tokens", type=int, default=128, metavar="N", help="per stream")
    add("--turns", type=int, default=7, metavar="N")
    add("--json", type=Path, metavar="FILE", help="write the figures here too")
    return options


def family(pid: int) -> Iterator[int]:
    """A process and all below it."""
    yield pid
    for thread in (PROC / str(pid) / "task").iterdir():
        for child in (thread / "children").read_text(encoding="ascii").split():
            yield from family(int(child))


def processor_seconds(pids: Iterable[int]) -> float:
    """What processes have had so far."""
    ticks = 0
    for pid in pids:
        fields = (PROC / str(pid) / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Taken:
    """Tokens per second, and µs of processor time for each: of all processes, and of the first alone."""

    rate: float
    cost: float
    first_cost: float


def taken(server: Server, num_streams: int, num_tokens: int, seed: int) -> Taken:
    first, *others = family(server.pid)
    before = processor_seconds([first]), processor_seconds(others)
    rate = asyncio.run(served(server.url, num_streams, num_tokens, seed)).rate
    spent = processor_seconds([first]) - before[0], processor_seconds(others) - before[1]
    scale = 1e6 / (num_streams * num_tokens)
    return Taken(rate, sum(spent) * scale, spent[0] * scale)


def rows(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    found: dict[tuple[int, str], list[Taken]] = {}
    servers: list[Server] = arguments.servers
    for turn in track(range(arguments.turns + 1), "turns", transient=True):
        for streams in arguments.streams:
            for each in servers if turn % 2 else servers[::-1]:
                told = taken(each, streams, arguments.tokens, seed=turn * streams)
                if turn:  # the first warms up
                    found.setdefault((streams, each.name), []).append(told)
    return [row(streams, name, told, found[streams, servers[0].name]) for (streams, name), told in found.items()]


def row(streams: int, name: str, told: Sequence[Taken], first: Sequence[Taken]) -> dict[str, Any]:
    """The share is the median of those of the turns."""
    return {
        "streams": streams,
        "server": name,
        "tokens_per_second": median(each.rate for each in told),
        "share": median(each.rate / other.rate for each, other in zip(told, first, strict=True)),
        "processor_us_per_token": median(each.cost for each in told),
        "first_process_us_per_token": median(each.first_cost for each in told),
    }


def table(found: Sequence[dict[str, Any]]) -> Table:
    result = Table(
        "streams", "server", "tokens/s", "share of the first", "processor, µs/token", "of which the first process"
    )
    for each in found:
        rate, share, cost = each["tokens_per_second"], each["share"], each["processor_us_per_token"]
        own = each["first_process_us_per_token"]
        result.add_row(str(each["streams"]), each["server"], f"{rate:.0f}", f"{share:.2f}", f"{cost:.0f}", f"{own:.0f}")
    return result


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parser().parse_args(argv)
    found = rows(arguments)
    tell(arguments, found, table(found), ("tokens", "turns"))


if __name__ == "__main__":
    main()
