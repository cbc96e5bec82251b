"""Seconds until a server is ready, and its memory then: `python -m research.ready NAME='COMMAND' …`.

Commands take turns. Each runs until it prints the word `ready`, then it is terminated. On Linux also the processor
seconds of all threads until then, and memory in bytes: `resident`, `own` (without pages of files) and `peak`. The first
turn warms file caches and is reported separately.
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
    """A command that ended without the word."""


def started(command: str) -> Figures:
    """Seconds until the word, with processor time and memory. Raises `NeverReady`."""
    begun = time.monotonic()
    with subprocess.Popen(shlex.split(command), stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:  # noqa: S603
        assert process.stdout is not None
        try:
            line = b""
            for line in process.stdout:
                if READY.search(line):
                    return {"seconds": round(time.monotonic() - begun, 3), **taken(process.pid)}
            raise NeverReady(f"{command} ended before it was ready: {line.decode(errors='replace').strip()}")
        finally:
            process.terminate()
            try:
                process.communicate(timeout=STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


def taken(pid: int) -> Figures:
    """Processor seconds and memory of a process; empty if it has ended, and on other systems than Linux."""
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
    """Per command: the first turn, and the medians of the others."""
    named = [command.partition("=")[::2] for command in commands]
    rounds = [[started(command) for _, command in named] for _ in range(turns + 1)]
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
    parser.add_argument("--turns", type=int, default=3, help="after the first")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    given = parser.parse_args(arguments)
    found = json.dumps({"turns": given.turns, "rows": measured(given.commands, given.turns)}, indent=1)
    print(found)
    if given.json:
        given.json.write_text(found + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
