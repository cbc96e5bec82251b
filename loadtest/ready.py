"""How long a server takes to be ready, and what memory it has then: `python -m loadtest.ready NAME='COMMAND' …`.

Commands are started in turns, and ended once they say the word `ready`. On Linux there is also what the process itself
took until then: `processor` seconds of all its threads, and memory in bytes, `resident` when it is ready, what of that
is its `own`, and its `peak`. The first turn of each warms caches up and is told apart.
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

from rich.console import Console

READY = re.compile(rb"\bready\b", re.IGNORECASE)
MEMORY = {"resident": "VmRSS", "own": "RssAnon", "peak": "VmHWM"}
"""`own` is without the pages of files, which the system may take back."""
LONGEST_END = 30
"""Seconds that a process may take to end."""

Figures = dict[str, float]


class NeverReady(RuntimeError):
    """A command that ended without the word."""


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(prog="loadtest.ready", allow_abbrev=False, description="Seconds until ready.")
    options.add_argument("commands", nargs="+", metavar="NAME=COMMAND")
    options.add_argument("--turns", type=int, default=3, metavar="N", help="after the first")
    options.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    return options


def started(command: str) -> Figures:
    """Seconds until the word, and what it took. Raises `NeverReady`."""
    begun = time.monotonic()
    arguments = shlex.split(command)
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:  # noqa: S603
        assert process.stdout is not None
        try:
            line = b""
            for line in process.stdout:
                if READY.search(line):
                    return {"seconds": round(time.monotonic() - begun, 3), **taken(process.pid)}
            last = line.decode(errors="replace").strip()
            raise NeverReady(f"{command} ended without saying that it is ready; its last words: {last}")
        finally:
            process.terminate()
            try:
                process.communicate(timeout=LONGEST_END)
            except subprocess.TimeoutExpired:
                process.kill()


def taken(pid: int) -> Figures:
    """Processor seconds and memory of a process; nothing where the system does not tell, or of one that has ended."""
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
    """The first turn and the medians of the others, of each command."""
    named = [command.partition("=") for command in commands]
    rounds = [[started(command) for _, _, command in named] for _ in range(turns + 1)]
    return [
        {
            "name": name,
            "command": command,
            "first": rounds[0][place],
            "warm": {
                key: median(each[place][key] for each in rounds[1:])
                for key in rounds[0][place]
                if all(key in each[place] for each in rounds)
            },
        }
        for place, (name, _, command) in enumerate(named)
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    given = parser().parse_args(arguments)
    rows = measured(given.commands, given.turns)
    Console().print_json(data=rows)
    if given.json:
        given.json.write_text(json.dumps({"turns": given.turns, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
