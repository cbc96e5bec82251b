"""Faults of a server's environment: its clock and its disk. `missing_…` says what a fault needs."""

import asyncio
import ctypes
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

from tests.server.forked_server import Prepare
from tests.server.server_process import ServerProcess, server_process

FAKETIME = sorted(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))
CLOCK = "clock"
"""The file next to the log with the clock's offset."""

JUMPS = ("+1h", "-1d", "+365d", "-2h", "+0")
NEXT_YEAR = f'"timestamp": "{time.gmtime().tm_year + 1}-'
"""Part of a log line after a jump of a year."""

JUMP_SECONDS = 1.5

NEW_MOUNTS, PRIVATE, REMOUNT_READ_ONLY = 0x00020000, (1 << 18) | (1 << 14), 4096 | 32 | 1
"""`CLONE_NEWNS`; `MS_PRIVATE` and `MS_REC`; `MS_BIND`, `MS_REMOUNT` and `MS_RDONLY`."""


BROKEN_FILE = "/proc/self/mem"
"""Each write fails with EIO: address 0 of the process's memory."""


def missing_faketime() -> str:
    return "" if FAKETIME else "Debian's libfaketime is not installed"


@contextmanager
def server_with_fake_clock(
    model_folder: Path, log: Path, *, prepare: Prepare | None = None, **options: object
) -> Iterator[ServerProcess]:
    """Start a server with libfaketime. Monotonic clocks stay real.

    libfaketime's correction of timed waits is off: it makes them return at once, so threads that wait for the GIL only
    pass it back and forth (seen with libfaketime 0.9.10 and Python 3.11).
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


def missing_root() -> str:
    return "" if os.geteuid() == 0 else "needs root"


def mount_read_only() -> None:
    """Mount the root read-only for this process. Files that are open for writing stay writable."""
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.unshare(NEW_MOUNTS)
    for flags in (PRIVATE, REMOUNT_READ_ONLY):
        failed = failed or libc.mount(None, b"/", None, flags, None)
    if failed:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def has_read_only_root(server: ServerProcess) -> bool:
    mounts = Path(f"/proc/{server.process.pid}/mountinfo").read_text().splitlines()
    return any(fields[4] == "/" and "ro" in fields[5].split(",") for fields in map(str.split, mounts))
