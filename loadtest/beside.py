"""What one server costs beside another: tokens per second and processor time per token, `python -m loadtest.beside`.

The servers run all the time and are asked in turns, never two at once. Processor time is that of a server's process and
of all that it has started, so it tells what a token costs on a machine that has other things to do too. Linux only.
"""

import argparse
import asyncio
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from loadtest.overhead import served

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


def taken(server: Server, num_streams: int, num_tokens: int, seed: int) -> tuple[float, float]:
    """Tokens per second, and µs of processor time for each."""
    processes = list(family(server.pid))
    before = processor_seconds(processes)
    rate = asyncio.run(served(server.url, num_streams, num_tokens, seed)).rate
    return rate, 1e6 * (processor_seconds(processes) - before) / (num_streams * num_tokens)


def rows(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    found: dict[tuple[int, str], list[tuple[float, float]]] = {}
    servers: list[Server] = arguments.servers
    for turn in track(range(arguments.turns + 1), "turns", transient=True):
        for streams in arguments.streams:
            for each in servers if turn % 2 else servers[::-1]:
                pair = taken(each, streams, arguments.tokens, seed=turn * streams)
                if turn:  # the first warms up
                    found.setdefault((streams, each.name), []).append(pair)
    return [row(streams, name, pairs, found[streams, servers[0].name]) for (streams, name), pairs in found.items()]


def row(
    streams: int, name: str, pairs: Sequence[tuple[float, float]], first: Sequence[tuple[float, float]]
) -> dict[str, Any]:
    """The share is the median of those of the turns."""
    return {
        "streams": streams,
        "server": name,
        "tokens_per_second": median(rate for rate, _ in pairs),
        "share": median(rate / other for (rate, _), (other, _) in zip(pairs, first, strict=True)),
        "processor_us_per_token": median(cost for _, cost in pairs),
    }


def table(found: Sequence[dict[str, Any]]) -> Table:
    result = Table("streams", "server", "tokens/s", "share of the first", "processor, µs/token")
    for each in found:
        rate, share, cost = each["tokens_per_second"], each["share"], each["processor_us_per_token"]
        result.add_row(str(each["streams"]), each["server"], f"{rate:.0f}", f"{share:.2f}", f"{cost:.0f}")
    return result


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parser().parse_args(argv)
    found = rows(arguments)
    Console().print(table(found))
    if arguments.json:
        settings = {name: getattr(arguments, name) for name in ("tokens", "turns")}
        arguments.json.write_text(json.dumps({**settings, "rows": found}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
