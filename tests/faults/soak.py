"""`python -m tests.faults.soak --seconds 3600 --json FILE`: samples the resources of a server under mixed load.

All clients send a request every `--beat` seconds: sequences compete for the cache, and the server is idle in between.
Memory, descriptors, threads, pages, CPU time and latencies should stay constant after the first minutes. Every response
is compared with an idle server's.
"""

import argparse
import asyncio
import json
import os
import random
import re
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

from nvium_core.bench.figures import write_json
from tests.byte_model import NAME, save_byte_model
from tests.faults.load import KEY, OPTIONS, Load, known_requests, percentiles, quiet_answers
from tests.server.forked_server import forked_server
from tests.server.server_process import ServerProcess

SERIES = {
    "pages": "kv_cache_usage_ratio",
    "running": "requests_running",
    "preemptions": "preemptions_total",
    "cached_prompt_tokens": "cached_prompt_tokens_total",
    "dropped_log_lines": "dropped_log_lines_total",
}
NUM_KNOWN = 40
TICKS = os.sysconf("SC_CLK_TCK")


def resources(server: ServerProcess) -> dict[str, Any]:
    """Return the server's resources, from the kernel and from its metrics."""
    folder = Path(f"/proc/{server.process.pid}")
    status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
    used = (folder / "stat").read_text().rpartition(")")[2].split()[11:13]
    page = httpx.get(f"{server.url}/metrics", headers={"authorization": f"Bearer {KEY}"}, timeout=300).text
    return {
        "resident_mb": round(int(status["VmRSS"].split()[0]) / 1024, 1),
        "threads": int(status["Threads"]),
        "descriptors": len(os.listdir(folder / "fd")),  # noqa: PTH208 (faster)
        "processor_seconds": sum(map(int, used)) / TICKS,
        **{name: series(page, rf"nvium_{metric}") for name, metric in SERIES.items()},
        "cancelled": series(page, r'nvium_requests_total\{[^}]*outcome="cancelled"\}'),
    }


def series(page: str, pattern: str) -> float:
    """Return the sum of all series that match the pattern."""
    return sum(float(value) for value in re.findall(rf"^{pattern} (\S+)$", page, re.MULTILINE))


async def watched(server: ServerProcess, load: Load, seconds: float, every: float) -> list[dict[str, Any]]:
    samples, started, seen = [], time.monotonic(), 0
    while (passed := time.monotonic() - started) < seconds:
        await asyncio.sleep(min(every, seconds - passed))
        took, seen = load.seconds[seen:], len(load.seconds)
        used = await asyncio.to_thread(resources, server)
        at = {"seconds": round(time.monotonic() - started, 1), "answers": len(took)}
        samples.append({**at, **used, **dict(percentiles(took))})
        sys.stderr.write(f"{samples[-1]}\n")
    load.is_over = True
    return samples


async def soaked(server: ServerProcess, given: argparse.Namespace) -> dict[str, Any]:
    expected = await quiet_answers(server.url, known_requests(NUM_KNOWN, random.Random(given.seed)))
    load = Load(expected, given.seed, given.beat)
    async with asyncio.TaskGroup() as group:
        group.create_task(load.run(server.url, given.clients))
        samples = await watched(server, load, given.seconds, given.every)
    return {"counts": load.counts, "samples": samples, "afterwards": await asyncio.to_thread(resources, server)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--every", type=float, default=30)
    parser.add_argument("--beat", type=float, default=3)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("--json", type=Path, required=True)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with forked_server(save_byte_model(Path(folder) / NAME), log, **OPTIONS) as server:
            result = asyncio.run(soaked(server, given))
        lines = [json.loads(line) for line in log.read_text().splitlines()]
    warnings = Counter(line["event"] for line in lines if line["level"] != "info")
    write_json({"warnings": warnings, **result}, given.json)


if __name__ == "__main__":
    main()
