"""Files of measured figures, each with how and where it was measured."""

import json
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from shutil import which
from typing import Any

from nvium_core.engine.validation import require

Figures = dict[str, Any]
"""Results of an experiment, as JSON values."""

ROOT = Path(__file__).parents[2]


def provenance() -> Figures:
    """Return the command without the folders of its files, the first processor, and in a checkout the commit."""
    return {
        "command": shlex.join(re.sub(r"(^|=)/.*/", r"\1", part) for part in sys.orig_argv),
        "processor": _processor(),
        "commit": _commit(),
    }


def check_place(json_file: Path | None) -> None:
    """Raise `InvalidRequest` if the file's folder does not exist. Call this before measuring."""
    require(json_file is None or json_file.parent.is_dir(), "json", f"no such folder: {json_file and json_file.parent}")


def write_json(figures: Figures | Sequence[Figures], path: Path) -> None:
    """Write an object or a list of objects, each with its `provenance` unless it has one."""
    known = provenance()
    content = {**known, **figures} if isinstance(figures, dict) else [{**known, **row} for row in figures]
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _processor() -> str:
    cpu_info = Path("/proc/cpuinfo")
    lines = cpu_info.read_text(encoding="utf-8").partition("\n\n")[0].splitlines() if cpu_info.exists() else []
    cpu = dict(line.replace("\t", "").split(":", 1) for line in lines)
    names = ("model name", "cpu family", "model")
    return ", ".join(f"{name}{cpu[name]}" for name in names if name in cpu) or platform.machine()


def _commit() -> str:
    """Return the checkout's commit, with `-dirty` if its code differs, or an empty string if this is no checkout."""
    if which("git") is None or not (ROOT / ".git").exists():
        return ""

    def git(*arguments: str) -> str:
        asked = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()  # noqa: S603 (ours)

    changed = git("status", "--porcelain", "--untracked-files=no", "--", "*.py", "*.h")
    return git("rev-parse", "--short=8", "HEAD") + ("-dirty" if changed else "")
