"""What a server costs: its streaming tokens per second as a share of the engine's own, `python -m loadtest.overhead`.

Takes turns between a running `nvium serve` and `nvium bench throughput`, both of the embedded model and never at once.
Knows the one by HTTP and the other by its command line. Start the server with as many threads: OMP_NUM_THREADS=1.
On Linux, with the server's process id, also what a token costs its event loop, which is the process's first thread.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from loadtest.bare_client import num_streamed
from loadtest.client import ServerError

PROMPT = "Once upon a time there was a"
"""That of `nvium bench`."""

REPEATS = 5
"""Of the engine's runs, of which the median counts: in the first, schedules are still being solved beside it."""

Rates = dict[int, float]
"""Tokens per second by the number of streams."""


@dataclass(frozen=True, slots=True)
class Served:
    """What some streams got: tokens per second, and the event loop's processor time for each, if it can be seen."""

    rate: float
    loop_us: float | None = None


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(
        prog="loadtest.overhead",
        allow_abbrev=False,
        description="Streaming over HTTP, as a share of the engine's speed.",
    )
    add = options.add_argument
    add("--base-url", default="http://127.0.0.1:8000", help="without /v1")
    add("--streams", type=int, nargs="+", default=[1, 8, 32], metavar="N", help="how many at once")
    add("--tokens", type=int, default=128, metavar="N", help="per stream")
    add("--turns", type=int, default=5, metavar="N")
    add("--threads", type=int, default=1, metavar="N", help="the engine's; the server has its own")
    add("--pid", type=int, metavar="PID", help="of the server: also tells its event loop's time per token (Linux)")
    add("--json", type=Path, metavar="FILE", help="write the figures here too")
    return options


def engine_rates(streams: Sequence[int], num_tokens: int, num_threads: int) -> Rates:
    """What the engine does in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "throughput.json"
        numbers = ",".join(map(str, streams))
        options = [f"--sequences={numbers}", f"--tokens={num_tokens}", f"--threads={num_threads}", f"--json={file}"]
        command = [sys.executable, "-m", "nvium_core.cli", "bench", "throughput", *options, f"--repeats={REPEATS}"]
        subprocess.run(command, check=True, capture_output=True)  # noqa: S603 (our own command)
        rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    return {row["sequences"]: row["tokens_per_second"] for row in rows}


async def served(base_url: str, num_streams: int, num_tokens: int, seed: int, pid: int | None = None) -> Served:
    """What streams get that are started together."""
    asked = {"model": "default", "prompt": PROMPT, "max_tokens": num_tokens, "ignore_eos": True}
    bodies = [{**asked, "seed": seed + number} for number in range(num_streams)]
    started, loop_started = time.perf_counter(), loop_seconds(pid) if pid else 0.0
    try:
        num_told = await num_streamed(base_url, bodies)
    except (ServerError, OSError) as error:
        raise SystemExit(f"loadtest.overhead: {error}") from error
    rate = num_told / (time.perf_counter() - started)
    return Served(rate, 1e6 * (loop_seconds(pid) - loop_started) / num_told if pid else None)


def loop_seconds(pid: int) -> float:
    """Processor time that a process's first thread has had."""
    nanoseconds, *_ = Path(f"/proc/{pid}/task/{pid}/schedstat").read_text(encoding="ascii").split()
    return int(nanoseconds) / 1e9


def turn(arguments: argparse.Namespace, number: int) -> list[tuple[Served, float]]:
    """The server's part and the engine's rate for each number of streams; the server goes first every other time."""

    def over_http() -> list[Served]:
        return [
            asyncio.run(served(arguments.base_url, streams, arguments.tokens, number * streams, arguments.pid))
            for streams in arguments.streams
        ]

    first = over_http() if number % 2 else None
    alone = engine_rates(arguments.streams, arguments.tokens, arguments.threads)
    return list(zip(first or over_http(), (alone[streams] for streams in arguments.streams), strict=True))


def rows(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    turns = [turn(arguments, number) for number in track(range(arguments.turns), "turns", transient=True)]
    return [row(streams, pairs) for streams, pairs in zip(arguments.streams, zip(*turns, strict=True), strict=True)]


def row(num_streams: int, pairs: Sequence[tuple[Served, float]]) -> dict[str, Any]:
    shares = [served.rate / alone for served, alone in pairs]
    loop_us = [served.loop_us for served, _ in pairs if served.loop_us is not None]
    return {
        "streams": num_streams,
        "served_tokens_per_second": median(served.rate for served, _ in pairs),
        "engine_tokens_per_second": median(alone for _, alone in pairs),
        "share": median(shares),
        "shares": shares,
        "loop_us_per_token": median(loop_us) if loop_us else None,
    }


def table(found: Sequence[dict[str, Any]]) -> Table:
    result = Table("streams", "over HTTP, tokens/s", "engine, tokens/s", "share", "event loop, µs/token")
    for each in found:
        rates = each["served_tokens_per_second"], each["engine_tokens_per_second"]
        loop_us = each["loop_us_per_token"]
        told = "" if loop_us is None else f"{loop_us:.1f}"
        result.add_row(str(each["streams"]), *(f"{rate:.1f}" for rate in rates), f"{each['share']:.3f}", told)
    return result


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parser().parse_args(argv)
    found = rows(arguments)
    tell(arguments, found, table(found), ("tokens", "turns", "threads"))


def tell(arguments: argparse.Namespace, found: Sequence[dict[str, Any]], shown: Table, settings: Sequence[str]) -> None:
    """Print what was found, and write it with these of the arguments if a file was asked for."""
    Console().print(shown)
    if arguments.json:
        asked = {name: getattr(arguments, name) for name in settings}
        arguments.json.write_text(json.dumps({**asked, "rows": found}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
