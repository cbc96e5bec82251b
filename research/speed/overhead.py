"""Measure serving overhead: streamed tokens per second relative to the engine alone or to another server.

    python -m research.speed.overhead
    python -m research.speed.overhead NAME,URL,PID … --prompt-words 400

Contenders take turns. The engine alone runs in its own process with `--threads` threads. The server must run the same
model with the same number of threads. If a process id is given (Linux only), the results include CPU times per token:
of the process with its descendants, of the process alone, and of its first thread, which runs the event loop. They also
include the most memory that the process has used. Prompts of several words differ from their first word on. The client
parses only the end of a stream, because parsing each token would take as much CPU time as serving it.
"""

import argparse
import asyncio
import json
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import cycle, islice
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console
from rich.progress import track
from rich.table import Table

from loadtest.client import DONE
from nvium_core.bench.figures import write_json
from nvium_core.bench.harness import PROMPT, subject_of, timed
from nvium_core.engine.config import EngineConfig
from nvium_core.engine.device.processor import use_processor
from nvium_core.engine.engine import Engine
from nvium_core.engine.sampling_params import SamplingParams
from nvium_core.loading import load_model

ENGINE = "engine"
WARM_UP_RUNS = 3
CLOCKS = ("processor", "first_process", "event_loop")
USAGE = re.compile(rb'"completion_tokens": ?(\d+)')
TAIL_BYTES = 2_000
"""The client keeps only this many bytes of a stream. They include the usage and the end."""


class StreamError(Exception):
    """A stream was refused or incomplete."""


@dataclass(frozen=True, slots=True)
class Server:
    name: str
    url: str
    pid: int | None = None

    @classmethod
    def parse(cls, text: str) -> "Server":
        """Parse NAME,URL,PID. Raise `ValueError` if the text is malformed."""
        name, url, pid = text.split(",")
        return cls(name, url, int(pid))


@dataclass(frozen=True, slots=True)
class Measured:
    """Tokens per second. If the process id is known, µs of CPU time per token for each of `CLOCKS`, and peak memory."""

    rate: float
    us_per_token: dict[str, float] = field(default_factory=dict)
    peak_bytes: int | None = None


def engine_rate(model: str | None, num_streams: int, num_tokens: int, num_threads: str) -> float:
    """Measure the engine's tokens per second, prefill included, after a warm-up."""
    use_processor("auto", num_threads)
    subject = subject_of(load_model(model))
    engine = Engine(subject.model, EngineConfig(max_sequences=max(32, num_streams)))
    params = [SamplingParams(max_tokens=num_tokens, seed=seed, ignore_eos=True) for seed in range(num_streams)]
    for _ in range(WARM_UP_RUNS):
        timed(engine, [(subject.prompt, each) for each in params])
    return timed(engine, [(subject.prompt, each) for each in params]).tokens_per_second


async def stream(base_url: str, body: dict[str, Any]) -> int:
    """Stream a completion. Return the number of tokens in the stream's usage, or raise `StreamError`."""
    address = urlsplit(base_url)
    content = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
    reader, writer = await asyncio.open_connection(address.hostname, address.port or 80)
    try:
        writer.write(f"{head}Content-Length: {len(content)}\r\nConnection: close\r\n\r\n".encode() + content)
        status, tail = await reader.readline(), b""
        while piece := await reader.read(2**16):
            tail = (tail + piece)[-TAIL_BYTES:]
            if DONE.encode() in tail:
                break
    finally:
        writer.close()
    usage = USAGE.search(tail)
    if b" 200 " not in status or DONE.encode() not in tail or not usage:
        raise StreamError(f"{base_url}: {status.decode('latin-1').strip()}; the stream has no usage or no {DONE}")
    return int(usage[1])


async def measure_server(server: Server, num_streams: int, num_tokens: int, seed: int, num_words: int) -> Measured:
    """Measure streams that start together. Raise `StreamError` if one fails."""
    fields = {"model": "default", "max_tokens": num_tokens, "ignore_eos": True}
    pids = list(process_tree(server.pid)) if server.pid else []
    started, before = time.perf_counter(), cpu_seconds(pids)
    seeds = range(seed, seed + num_streams)
    streams = (stream(server.url, {**fields, "prompt": prompt(num_words, each), "seed": each}) for each in seeds)
    num_received = sum(await asyncio.gather(*streams))
    seconds, after = time.perf_counter() - started, cpu_seconds(pids)
    us_per_token = {name: 1e6 * (after[name] - before[name]) / num_received for name in after}
    return Measured(num_received / seconds, us_per_token, peak_bytes(server.pid) if server.pid else None)


def prompt(num_words: int, seed: int) -> str:
    """Return `PROMPT`, or a text of so many words that begins with the seed, so that no server has cached it."""
    return " ".join([str(seed), *islice(cycle(PROMPT.split()), num_words - 1)]) if num_words else PROMPT


def peak_bytes(pid: int) -> int:
    """Return the largest resident memory so far of a process alone."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


def process_tree(pid: int) -> Iterator[int]:
    """Yield a process and its descendants."""
    yield pid
    for thread in Path(f"/proc/{pid}/task").iterdir():
        for child in (thread / "children").read_text(encoding="ascii").split():
            yield from process_tree(int(child))


def cpu_seconds(pids: Sequence[int]) -> dict[str, float]:
    """Return the CPU seconds used so far, for each of `CLOCKS`, or {} without processes."""
    if not pids:
        return {}
    nanoseconds, *_ = Path(f"/proc/{pids[0]}/task/{pids[0]}/schedstat").read_text(encoding="ascii").split()
    first = processor_seconds(pids[:1])
    return dict(zip(CLOCKS, (first + processor_seconds(pids[1:]), first, int(nanoseconds) / 1e9), strict=True))


def processor_seconds(pids: Iterable[int]) -> float:
    """Return the user and system time of processes."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


Turn = Mapping[tuple[int, str], Measured]
"""Results by number of streams and contender."""


def take_turn(args: argparse.Namespace, servers: Sequence[Server | None], number: int) -> Turn:
    """Measure every contender at every number of streams. None stands for the engine. Odd turns reverse the order."""
    found: dict[tuple[int, str], Measured] = {}
    for server in servers[:: -1 if number % 2 else 1]:
        for streams in args.streams:
            if server:
                coroutine = measure_server(server, streams, args.tokens, 1000 * number + streams, args.prompt_words)
                found[streams, server.name] = asyncio.run(coroutine)
            else:
                with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
                    rate = process.submit(engine_rate, args.model, streams, args.tokens, args.threads).result()
                found[streams, ENGINE] = Measured(rate)
    return found


def row(turns: Sequence[Turn], streams: int, name: str, baseline: str) -> dict[str, Any]:
    """Return medians over the turns."""
    found = [turn[streams, name] for turn in turns]
    shares = [turn[streams, name].rate / turn[streams, baseline].rate for turn in turns]
    times = {clock: [each.us_per_token[clock] for each in found] for clock in found[0].us_per_token}
    return {
        "streams": streams,
        "server": name,
        "tokens_per_second": median(each.rate for each in found),
        "turns": [each.rate for each in found],
        "share": median(shares),
        "shares": shares,
        "peak_bytes": found[-1].peak_bytes,
        **{f"{clock}_us_per_token": median(turns) for clock, turns in times.items()},
        **{f"{clock}_us_per_token_turns": turns for clock, turns in times.items()},
    }


def table(rows: Sequence[Mapping[str, Any]]) -> Table:
    result = Table("streams", "server", "tokens/s", "share", "MB", *CLOCKS, caption="CPU time in µs per token.")
    for each in rows:
        times = (f"{each[f'{clock}_us_per_token']:.0f}" if f"{clock}_us_per_token" in each else "" for clock in CLOCKS)
        rate = f"{each['tokens_per_second']:.1f}", f"{each['share']:.3f}"
        memory = f"{each['peak_bytes'] / 1e6:.0f}" if each["peak_bytes"] else ""
        result.add_row(str(each["streams"]), each["server"], *rate, memory, *times)
    return result


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="research.speed.overhead", description=__doc__)
    add = parser.add_argument
    add("servers", type=Server.parse, nargs="*", metavar="NAME,URL,PID", help="servers to compare with the first one")
    add("--base-url", default="http://127.0.0.1:8000", help="server to compare with the engine, without /v1")
    add("--pid", type=int, help="process id of the server at --base-url (Linux)")
    add("--model", help="model of the engine [the bundled model]")
    add("--threads", default="1", help="threads of the engine [1]")
    add("--streams", type=int, nargs="+", default=[1, 8, 32], help="numbers of concurrent streams")
    add("--tokens", type=int, default=128, help="tokens per stream [128]")
    add("--prompt-words", type=int, default=0, metavar="N", help="words of a prompt [a sentence, the same for all]")
    add("--turns", type=int, default=5, help="measured turns, after one that warms up [5]")
    add("--json", type=Path, help="also write the results to this file")
    args = parser.parse_args(argv)
    servers = args.servers or [None, Server("server", args.base_url, args.pid)]
    numbers = track(range(args.turns + 1), "turns", transient=True)
    _, *turns = (take_turn(args, servers, number) for number in numbers)
    names = [server.name if server else ENGINE for server in servers]
    rows = [row(turns, streams, name, names[0]) for streams in args.streams for name in names]
    Console().print(table(rows))
    if args.json:
        settings = {name: getattr(args, name) for name in ("tokens", "prompt_words", "turns", "threads")}
        write_json({**settings, "rows": rows}, args.json)


if __name__ == "__main__":
    main()
