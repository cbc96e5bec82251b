"""Files of measured figures, each with how and where it was measured, and the speed of the machine."""

import json
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from shutil import which
from timeit import repeat
from typing import Any

import torch
from torch.utils.benchmark import timer

from nvium_core.engine.device.paged_cache import zeros
from nvium_core.engine.errors import require

Figures = dict[str, Any]
"""Results of an experiment, as JSON values."""

ROOT = Path(__file__).parents[2]

BUFFER_BYTES = 2**30  # size of the buffer that is read; larger than the CPU's caches
ENOUGH_SECONDS = 0.02  # the matrices grow until one product takes this long

MIN_WIDTH, MAX_WIDTH = 128, 8192
TRIES = 5


def provenance() -> Figures:
    """Return the command without the folders of its files, the first processor, and in a checkout the commit."""
    command = shlex.join(re.sub(r"(^|=)/.*/", r"\1", part) for part in sys.orig_argv)
    return {
        "command": re.sub(r"^python[\d.]* (?=nvium )", "", command),
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


def machine(like: torch.Tensor, buffer_bytes: int = BUFFER_BYTES, enough_seconds: float = ENOUGH_SECONDS) -> Figures:
    """Measure bytes per second, and FLOP/s by precision. `like`: any tensor with the model's device and precision.

    Some CPUs compute with 16-bit weights in float32.
    """
    precisions = [like.dtype, torch.float32] if like.dtype.itemsize == 2 else [like.dtype]
    return {
        "bytes_per_second": read_rate(like.device, buffer_bytes),
        "flops_per_second": {
            str(dtype).removeprefix("torch."): arithmetic_rate(dtype, like.device, enough_seconds)
            for dtype in precisions
        },
    }


def read_rate(device: torch.device, num_bytes: int) -> float:
    """Measure the bytes read per second by a sum and by a matrix-vector product, in float32. Return the higher rate."""
    buffer = zeros(num_bytes).view(torch.float32).fill_(1).to(device)  # in huge pages, as packed weights
    width = 4096 if num_bytes >= 2**24 else 64
    matrix, vector = buffer[: len(buffer) // width * width].view(-1, width), torch.zeros(width, device=device)
    return num_bytes / min(least_seconds(buffer.sum), least_seconds(lambda: matrix @ vector))


def arithmetic_rate(dtype: torch.dtype, device: torch.device, enough_seconds: float) -> float:
    """Measure FLOP/s of a product of square matrices."""
    width = MIN_WIDTH
    while True:
        matrix = torch.full((width, width), 1 / width, dtype=dtype, device=device)
        taken = least_seconds(partial(torch.matmul, matrix, matrix))
        if taken >= enough_seconds or width == MAX_WIDTH:
            return 2 * width**3 / taken
        width *= 2


def least_seconds(work: Callable[[], object]) -> float:
    """Return the time of the fastest of `TRIES` runs, after a warm-up run. PyTorch's timer waits for a GPU."""
    work()
    return min(repeat(work, timer=timer, repeat=TRIES, number=1))
