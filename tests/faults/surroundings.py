"""Faults of what a server stands on: its clock, its disk, its memory; and what a machine lacks to have them."""

import asyncio
import ctypes
import os
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from random import Random

from tests.faults.load import ask_for_much
from tests.server.forked_server import Prepare
from tests.server.server_process import ServerProcess, server_process

FAKETIME = sorted(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))
CLOCK = "clock"
"""The file beside the log that says by how much the clock is wrong."""

JUMPS = ("+1h", "-1d", "+365d", "-2h", "+0")
NEXT_YEAR = f'"timestamp": "{time.gmtime().tm_year + 1}-'
"""In the log."""

JUMP_SECONDS = 1.5

NEW_MOUNTS, PRIVATE, REMOUNT_READ_ONLY = 0x00020000, (1 << 18) | (1 << 14), 4096 | 32 | 1
"""`CLONE_NEWNS`; `MS_PRIVATE` and `MS_REC`; `MS_BIND`, `MS_REMOUNT` and `MS_RDONLY`."""

MEMORY_GROUPS = Path("/sys/fs/cgroup/memory")
MEMORY_SECONDS = 3


def no_faketime() -> str:
    return "" if FAKETIME else "Debian's libfaketime is not installed"


@contextmanager
def with_a_clock_that_can_jump(
    model_folder: Path, log: Path, *, prepare: Prepare | None = None, **options: object
) -> Iterator[ServerProcess]:
    """A process that never had another clock. What counts time, as a kernel does, is left alone.

    libfaketime's correction of timed waits makes them return at once: two threads that want the interpreter then hand
    it to and fro, and hardly anything runs (seen with 0.9.10 and Python 3.11).
    """
    assert prepare is None
    clock = log.with_name(CLOCK)
    clock.write_text("+0\n")
    variables = {"LD_PRELOAD": str(FAKETIME[0]), "FAKETIME_TIMESTAMP_FILE": str(clock), "FAKETIME_NO_CACHE": "1"}
    variables |= {"FAKETIME_DONT_FAKE_MONOTONIC": "1", "DONT_FAKE_MONOTONIC": "1", "FAKETIME_FORCE_MONOTONIC_FIX": "0"}
    with server_process(model_folder, log.parent, variables=variables, **options) as server:
        yield server


async def clock_jumps(server: ServerProcess, chance: Random) -> None:
    for jump in JUMPS:
        server.log_file.with_name(CLOCK).write_text(f"{jump}\n")
        await asyncio.sleep(JUMP_SECONDS)


def no_root() -> str:
    return "" if os.geteuid() == 0 else "needs root"


def everything_read_only() -> None:
    """For this process; what it has open for writing stays so."""
    libc = ctypes.CDLL(None, use_errno=True)
    steps = (
        lambda: libc.unshare(NEW_MOUNTS),
        lambda: libc.mount(None, b"/", None, PRIVATE, None),
        lambda: libc.mount(None, b"/", None, REMOUNT_READ_ONLY, None),
    )
    for step in steps:
        if step():
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def sees_a_read_only_disk(server: ServerProcess) -> bool:
    """The root of its own mounts."""
    mounts = Path(f"/proc/{server.process.pid}/mountinfo").read_text().splitlines()
    return any(fields[4] == "/" and "ro" in fields[5].split(",") for fields in map(str.split, mounts))


@asynccontextmanager
async def broken_disk(_: Path) -> AsyncIterator[Path]:
    """Each write to it is EIO: the first page of a process's own memory, where there is none."""
    yield Path("/proc/self/mem")


def no_memory_groups() -> str:
    is_there = (MEMORY_GROUPS / "memory.limit_in_bytes").exists() and os.access(MEMORY_GROUPS, os.W_OK)
    return "" if is_there else "no control group of memory can be made here"


def memory_group(pid: int) -> Path:
    return MEMORY_GROUPS / f"nvium-faults-{pid}"


def into_a_memory_group() -> None:
    group = memory_group(os.getpid())
    group.mkdir()
    (group / "cgroup.procs").write_text(str(os.getpid()))


async def no_memory_of_its_group(server: ServerProcess, chance: Random) -> None:
    """For three seconds the group has no more than it uses, and somebody asks for much."""
    group = memory_group(server.process.pid)
    used = int((group / "memory.usage_in_bytes").read_text())
    limit = group / "memory.limit_in_bytes"
    limit.write_text(str(used))
    await ask_for_much(server.url)
    await asyncio.sleep(MEMORY_SECONDS)
    limit.write_text("-1")


def was_refused_memory(server: ServerProcess) -> bool:
    return int((memory_group(server.process.pid) / "memory.failcnt").read_text()) > 0


def remove_memory_groups() -> None:
    """Those whose processes have ended."""
    for group in MEMORY_GROUPS.glob("nvium-faults-*"):
        if not (group / "cgroup.procs").read_text():
            group.rmdir()
