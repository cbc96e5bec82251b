"""All faults. Each fault is reverted, unless it ends the server."""

import asyncio
import fcntl
import os
import re
import resource
import signal
import socket
import struct
import termios
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    ExitStack,
    asynccontextmanager,
    nullcontext,
    suppress,
)
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random

from nvium_core import Engine
from tests.faults import surroundings
from tests.faults.cluster import cluster
from tests.faults.load import KEY, ask_for_much
from tests.server.forked_server import Prepare, forked_server
from tests.server.server_process import ServerProcess

Inject = Callable[[ServerProcess, Random], Awaitable[None]]
PIPE_BYTES = 4_096
SILENT_CLIENTS = 300
FILES = 200
HANG_SECONDS = 12
"""Longer than the gateway takes to detect that a replica hangs."""

TERM, INT, KILL = signal.SIGTERM, signal.SIGINT, signal.SIGKILL


@dataclass(frozen=True)
class Kind:
    """A kind of fault.

    `ends` are the possible exit codes. Empty means that the server must survive. If it `may_live`, both are allowed.
    `start` starts a server as `forked_server` does. `log` opens the server's log. `missing` names what this machine
    lacks for the fault, or returns an empty string.
    `aborts` are words that a library logs when it aborts the process, which nothing can catch.
    `had_effect` checks a surviving server. Only a killed process `may_lose` requests without a response.
    """

    name: str
    inject: Inject
    ends: tuple[int, ...] = ()
    prepare: Prepare | None = None
    log: Callable[[Path], AbstractAsyncContextManager[Path]] | None = None
    start: Callable[..., AbstractContextManager[ServerProcess]] = forked_server
    missing: Callable[[], str] = str
    is_quick: bool = False
    aborts: str = ""
    may_live: bool = False
    may_lose: bool = False
    had_effect: Callable[[ServerProcess], bool] = bool


def drops_lines(server: ServerProcess) -> bool:
    page = server.http.get("/metrics", headers={"authorization": f"Bearer {KEY}"}).text
    [number] = re.findall(r"^nvium_dropped_log_lines_total (\S+)$", page, re.MULTILINE)
    return float(number) > 0


def fills_its_pipe(server: ServerProcess) -> bool:
    """Return whether the pipe is almost full, so writing the next line would block."""
    reading = os.open(server.log_file, os.O_RDONLY | os.O_NONBLOCK)
    [waiting] = struct.unpack("i", fcntl.ioctl(reading, termios.FIONREAD, b"\0" * 4))
    os.close(reading)
    return bool(waiting > PIPE_BYTES // 2)


def logs(words: str) -> Callable[[ServerProcess], bool]:
    return lambda server: words in server.log()


async def nothing(server: ServerProcess, chance: Random) -> None:
    """Do nothing: the fault is present from the start."""


async def silent_clients(server: ServerProcess, chance: Random) -> None:
    address = (server.http.base_url.host, server.http.base_url.port)
    with ExitStack() as stack:
        for _ in range(SILENT_CLIENTS):
            stack.enter_context(socket.create_connection(address, timeout=10))
            await asyncio.sleep(0)
        await asyncio.sleep(2)


async def no_more_memory(server: ServerProcess, chance: Random) -> None:
    """Allow no further writable pages for two seconds, and send requests that need memory.

    A limit of the address space would not work: the allocator has reserved 64 MB of it for each thread.
    """
    pid = server.process.pid
    before = resource.prlimit(pid, resource.RLIMIT_DATA)
    resource.prlimit(pid, resource.RLIMIT_DATA, (writable_bytes(pid), before[1]))
    await ask_for_much(server.url)
    await asyncio.sleep(2)
    with suppress(ProcessLookupError):  # the server may have exited with 1
        resource.prlimit(pid, resource.RLIMIT_DATA, before)


def writable_bytes(pid: int) -> int:
    [kilobytes] = re.findall(r"^VmData:\s+(\d+) kB$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return int(kilobytes) * 1024


async def signalled(number: int, server: ServerProcess, chance: Random) -> None:
    await asyncio.sleep(chance.random())
    server.process.send_signal(number)


async def paused(server: ServerProcess, chance: Random, seconds: float = 0) -> None:
    await signalled(signal.SIGSTOP, server, chance)
    await asyncio.sleep(seconds or 1 + 2 * chance.random())
    server.process.send_signal(signal.SIGCONT)


async def slowed(server: ServerProcess, chance: Random) -> None:
    """Let the process run a fifth of the time."""
    for _ in range(20):
        server.process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(0.16)
        server.process.send_signal(signal.SIGCONT)
        await asyncio.sleep(0.04)


def break_the_device_thread() -> None:
    """Fail every Step after 300 Steps. A MemoryError would end the process at once and cut responses."""
    step, steps = Engine.step, iter(range(300))

    def broken(engine: Engine) -> object:
        if next(steps, None) is None:
            raise RuntimeError
        return step(engine)

    Engine.step = broken


async def until_it_ends(server: ServerProcess, chance: Random) -> None:
    for _ in range(600):
        if server.process.poll() is not None:
            return
        await asyncio.sleep(0.1)


def limited(kind: int, limit: int) -> Prepare:
    return partial(resource.setrlimit, kind, (limit, limit))


def written_to(path: str) -> Callable[[Path], AbstractAsyncContextManager[Path]]:
    return lambda _: nullcontext(Path(path))


@asynccontextmanager
async def pipe_without_reader(folder: Path) -> AsyncIterator[Path]:
    """Close the reading end once the server has begun to write."""
    reading = pipe(folder)
    leaving = asyncio.get_running_loop().call_later(3, os.close, reading)
    yield folder / "pipe"
    leaving.cancel()


@asynccontextmanager
async def pipe_that_nobody_reads(folder: Path) -> AsyncIterator[Path]:
    reading = pipe(folder)
    yield folder / "pipe"
    os.close(reading)


def pipe(folder: Path) -> int:
    os.mkfifo(folder / "pipe")
    reading = os.open(folder / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    fcntl.fcntl(reading, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    return reading


def of_a_replica(inject: Inject) -> Inject:
    return lambda server, chance: inject(chance.choice(server.replicas), chance)


FEW_FILES, CLOSED = limited(resource.RLIMIT_NOFILE, FILES), "closed waiting connections"
hangs = partial(paused, seconds=HANG_SECONDS)

KINDS = [
    Kind("more clients than files", silent_clients, prepare=FEW_FILES, had_effect=logs(CLOSED), is_quick=True),
    Kind("log on a full disk", nothing, log=written_to("/dev/full"), had_effect=drops_lines, is_quick=True),
    Kind("log on a broken disk", nothing, log=written_to(surroundings.BROKEN_FILE), had_effect=drops_lines),
    Kind("log's reader gone", nothing, log=pipe_without_reader, had_effect=drops_lines),
    Kind("log's reader asleep", nothing, log=pipe_that_nobody_reads, had_effect=fills_its_pipe, is_quick=True),
    Kind("no file may grow", nothing, prepare=limited(resource.RLIMIT_FSIZE, 0), had_effect=drops_lines),
    Kind(
        "everything read-only",
        nothing,
        prepare=surroundings.mount_read_only,
        missing=surroundings.missing_root,
        had_effect=surroundings.has_read_only_root,
    ),
    Kind(
        "no more memory",
        no_more_memory,
        ends=(1,),
        aborts="memory allocation of",  # Rust's, in tokenizers and pydantic
        may_live=True,
        may_lose=True,
        had_effect=logs("MemoryError"),
        is_quick=True,
    ),
    Kind(
        "clock jumps",
        surroundings.clock_jumps,
        start=surroundings.server_with_fake_clock,
        missing=surroundings.missing_faketime,
        had_effect=logs(surroundings.NEXT_YEAR),
    ),
    Kind("SIGTERM", partial(signalled, TERM), ends=(0,), is_quick=True),
    Kind("SIGINT", partial(signalled, INT), ends=(0,)),
    Kind("SIGKILL", partial(signalled, KILL), ends=(-KILL,), may_lose=True, is_quick=True),
    Kind("SIGSTOP and SIGCONT", paused, is_quick=True),
    Kind("slowed", slowed),
    Kind("device thread dies", until_it_ends, ends=(1,), prepare=break_the_device_thread, is_quick=True),
    Kind("one of two replicas killed", of_a_replica(partial(signalled, KILL)), start=cluster, is_quick=True),
    Kind("one of two replicas stopped and continued", of_a_replica(hangs), start=cluster, is_quick=True),
    Kind("one of two replicas slowed", of_a_replica(slowed), start=cluster),
    Kind("gateway terminated", partial(signalled, TERM), ends=(0,), start=cluster),
    Kind("gateway killed", partial(signalled, KILL), ends=(-KILL,), start=cluster, may_lose=True, is_quick=True),
]
