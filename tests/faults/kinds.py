"""Faults of a single server. Each fault is reverted, unless it ends the server."""

import asyncio
import fcntl
import os
import re
import resource
import signal
import socket
import struct
import termios
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager, ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Protocol

from tests.faults.load import KEY, ask_for_much
from tests.server.forked_server import Prepare, forked_server
from tests.server.server_process import ServerProcess

Inject = Callable[[ServerProcess, Random], Awaitable[None]]
PIPE_BYTES = 4_096
SILENT_CLIENTS = 300
FILES = 128


class Start(Protocol):
    """Starts a server that logs to a file and is ready when the context is entered, as `forked_server` does."""

    def __call__(
        self, model_folder: Path, log: Path, *, prepare: Prepare | None = None, **options: object
    ) -> AbstractContextManager[ServerProcess]: ...


@dataclass(frozen=True)
class Kind:
    """A kind of fault.

    `ends` are the possible exit codes. Empty means that the server must survive. If it `may_live`, both are allowed.
    `log` opens the server's log. `missing` names what this machine lacks for the fault, or returns an empty string.
    `had_effect` checks a surviving server. Only a killed process `may_lose` requests without a response.
    """

    name: str
    inject: Inject
    ends: tuple[int, ...] = ()
    prepare: Prepare | None = None
    log: Callable[[Path], AbstractAsyncContextManager[Path]] | None = None
    start: Start = forked_server
    options: Mapping[str, object] = field(default_factory=dict)
    missing: Callable[[], str] = str
    is_quick: bool = False
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


async def paused(server: ServerProcess, chance: Random) -> None:
    await signalled(signal.SIGSTOP, server, chance)
    await asyncio.sleep(1 + 2 * chance.random())
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
    from nvium_core import Engine  # noqa: PLC0415 (imported in the server's process)

    step, steps = Engine.step, iter(range(300))

    def broken(engine: Engine) -> object:
        if next(steps, None) is None:
            raise RuntimeError
        return step(engine)

    Engine.step = broken  # type: ignore[method-assign,assignment]


async def until_it_ends(server: ServerProcess, chance: Random) -> None:
    for _ in range(600):
        if server.process.poll() is not None:
            return
        await asyncio.sleep(0.1)


def files_at_most(number: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (number, number))


def no_file_may_grow() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


@asynccontextmanager
async def full_disk(_: Path) -> AsyncIterator[Path]:
    yield Path("/dev/full")


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
