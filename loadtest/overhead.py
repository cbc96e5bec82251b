"""What a server costs: its streaming tokens per second as a share of the engine's own, `python -m loadtest.overhead`.

Takes turns between a running `nvium serve` and `nvium bench throughput`, both of the embedded model and never at once.
Knows the one by HTTP and the other by its command line. Start the server with as many threads: OMP_NUM_THREADS=1.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import httpx
from rich.console import Console
from rich.progress import track
from rich.table import Table

from loadtest.client import LoadClient
from loadtest.prompts import Lengths, Prompt
from loadtest.report import Report
from loadtest.workload import Workload

PROMPTS = (Prompt("Once upon a time there was a"),)
"""That of `nvium bench`."""

Rates = dict[int, float]
"""Tokens per second by the number of streams."""


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
    add("--json", type=Path, metavar="FILE", help="write the figures here too")
    return options


def engine_rates(streams: Sequence[int], num_tokens: int, num_threads: int) -> Rates:
    """What the engine does in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "throughput.json"
        numbers = ",".join(map(str, streams))
        options = [f"--sequences={numbers}", f"--tokens={num_tokens}", f"--threads={num_threads}", f"--json={file}"]
        command = [sys.executable, "-m", "nvium_core.cli", "bench", "throughput", *options, "--repeats=1"]
        subprocess.run(command, check=True, capture_output=True)  # noqa: S603 (our own command)
        rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    return {row["sequences"]: row["tokens_per_second"] for row in rows}


async def server_rate(base_url: str, num_streams: int, num_tokens: int, seed: int) -> float:
    """Tokens per second of streams that are started together."""
    load = Workload(
        prompts=PROMPTS,
        num_requests=num_streams,
        concurrency=num_streams,
        max_tokens=Lengths(num_tokens, num_tokens),
        seed=seed,
        ignore_eos=True,
    )
    async with httpx.AsyncClient(base_url=base_url, timeout=300) as http:
        report = Report.of(await LoadClient(http).run(load))
    if report.num_failed:
        raise SystemExit(f"loadtest.overhead: {report.errors}")
    return report.tokens_per_second


def turn(arguments: argparse.Namespace, number: int) -> list[tuple[float, float]]:
    """The server's rate and the engine's, for each number of streams; the server goes first every other time."""

    def over_http() -> Rates:
        seeds = {streams: number * streams for streams in arguments.streams}
        rate = {n: server_rate(arguments.base_url, n, arguments.tokens, seed) for n, seed in seeds.items()}
        return {streams: asyncio.run(measured) for streams, measured in rate.items()}

    served = over_http() if number % 2 else None
    alone = engine_rates(arguments.streams, arguments.tokens, arguments.threads)
    served = served or over_http()
    return [(served[streams], alone[streams]) for streams in arguments.streams]


def rows(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    turns = [turn(arguments, number) for number in track(range(arguments.turns), "turns", transient=True)]
    return [row(streams, pairs) for streams, pairs in zip(arguments.streams, zip(*turns, strict=True), strict=True)]


def row(num_streams: int, pairs: Sequence[tuple[float, float]]) -> dict[str, Any]:
    shares = [served / alone for served, alone in pairs]
    return {
        "streams": num_streams,
        "served_tokens_per_second": median(served for served, _ in pairs),
        "engine_tokens_per_second": median(alone for _, alone in pairs),
        "share": median(shares),
        "shares": shares,
    }


def table(found: Sequence[dict[str, Any]]) -> Table:
    result = Table("streams", "over HTTP, tokens/s", "engine, tokens/s", "share")
    for each in found:
        rates = each["served_tokens_per_second"], each["engine_tokens_per_second"]
        result.add_row(str(each["streams"]), *(f"{rate:.1f}" for rate in rates), f"{each['share']:.3f}")
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
