"""`python -m tests.faults.soak --seconds 3600 --json FILE`: samples the resources of a server under mixed load.

All clients send a request every `--beat` seconds: sequences compete for the cache, and the server is idle in between.
Memory, descriptors, threads, pages, CPU time and latencies should stay constant after the first minutes. Every response
is compared with an idle server's.
"""

import argparse
import asyncio
import json
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
    "resident_bytes": "process_resident_memory_bytes",
    "descriptors": "process_open_fds",
    "processor_seconds": "process_cpu_seconds_total",
    "pages": "nvium_kv_cache_usage_ratio",
    "running": "nvium_requests_running",
    "preemptions": "nvium_preemptions_total",
    "cached_prompt_tokens": "nvium_cached_prompt_tokens_total",
    "dropped_log_lines": "nvium_dropped_log_lines_total",
    "cancelled": r'nvium_requests_total\{[^}]*outcome="cancelled"\}',
}
"""Matches the series of the metrics page whose sums are sampled."""

NUM_KNOWN = 40


def resources(server: ServerProcess) -> dict[str, Any]:
    page = httpx.get(f"{server.url}/metrics", headers={"authorization": f"Bearer {KEY}"}, timeout=300).text
    found = {name: re.findall(rf"^{pattern} (\S+)$", page, re.MULTILINE) for name, pattern in SERIES.items()}
    sums = {name: sum(map(float, values)) for name, values in found.items()}
    return {"threads": len([*Path(f"/proc/{server.process.pid}/task").iterdir()]), **sums}


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
