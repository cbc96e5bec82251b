"""Measure the time until a server is ready, and its memory use at that time.

    python -m research.ready NAME='COMMAND' …

Commands take turns. A command is terminated when it prints the word `ready`. On Linux, the results include CPU seconds
of all threads and memory in bytes: `resident`, `own` (without mapped files) and `peak`. The first turn fills file
caches and is reported separately.
"""

import argparse
import json
import os
import re
import shlex
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

READY = re.compile(rb"\bready\b", re.IGNORECASE)
MEMORY = {"resident": "VmRSS", "own": "RssAnon", "peak": "VmHWM"}
STOP_SECONDS = 30

Figures = dict[str, float]


class NeverReady(RuntimeError):
    """A command ended without printing `ready`."""


def measure_start(command: str) -> Figures:
    """Run a command until it is ready. Return seconds, CPU time and memory, or raise `NeverReady`."""
    begun = time.monotonic()
    with subprocess.Popen(shlex.split(command), stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:  # noqa: S603
        assert process.stdout is not None
        try:
            line = b""
            for line in process.stdout:
                if READY.search(line):
                    return {"seconds": round(time.monotonic() - begun, 3), **usage(process.pid)}
            raise NeverReady(f"{command}: ended before it was ready: {line.decode(errors='replace').strip()}")
        finally:
            process.terminate()
            try:
                process.communicate(timeout=STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


def usage(pid: int) -> Figures:
    """Return CPU seconds and memory of a process, or nothing if it has ended or the system is not Linux."""
    status, stat = Path(f"/proc/{pid}/status"), Path(f"/proc/{pid}/stat")
    if not status.exists():
        return {}
    lines = dict(line.split(":", 1) for line in status.read_text(encoding="ascii").splitlines())
    if not lines.keys() >= {*MEMORY.values()}:
        return {}
    user, system = stat.read_text(encoding="ascii").rpartition(")")[2].split()[11:13]
    processor = (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
    return {"processor": processor, **{name: 1024 * int(lines[field].split()[0]) for name, field in MEMORY.items()}}


def measured(commands: Sequence[str], turns: int) -> list[dict[str, Any]]:
    """Return, for each command, its first turn and the medians of its other turns."""
    named = [command.partition("=")[::2] for command in commands]
    rounds = [[measure_start(command) for _, command in named] for _ in range(turns + 1)]
    rows = []
    for place, (name, command) in enumerate(named):
        first, *others = (turn[place] for turn in rounds)
        known = [key for key in first if all(key in turn for turn in others)]
        warm = {key: median(turn[key] for turn in others) for key in known}
        rows.append({"name": name, "command": command, "first": first, "warm": warm})
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="research.ready", description=__doc__)
    parser.add_argument("commands", nargs="+", metavar="NAME=COMMAND")
    parser.add_argument("--turns", type=int, default=3, help="number of turns after the first")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    args = parser.parse_args(arguments)
    found = json.dumps({"turns": args.turns, "rows": measured(args.commands, args.turns)}, indent=1)
    print(found)
    if args.json:
        args.json.write_text(found + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
