"""Helper processes for untrusted input: chat templates and grammars.

If a helper crashes, or exceeds its limits of CPU time or memory, its pipe closes. A helper that does not answer within
`PATIENCE_SECONDS` is killed. `HELPERS` kills stopped helpers, and limits the memory of all helpers together. A helper
dies with its parent, even if the parent was killed.
"""

import ctypes
import json
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from importlib import import_module
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import NoReturn
from weakref import WeakSet, finalize

PATIENCE_SECONDS = 20.0
"""Maximum time between a message to a helper and its reply. It is longer than any limit of CPU time."""

MAX_FORKED_BYTES = 2 << 30
"""Maximum memory of all forks together, without what each shares with its parent."""

PROGRAM = (
    "import sys, json; sys.path[:] = json.loads(sys.argv.pop()); sys.argv[0] = 'nvium'; from {} import main; main()"
)
"""Code that runs a module's `main` with our import path. The `argv[0]` keeps `nvium_core` from importing PyTorch."""


class HelperLost(Exception):
    """The helper ended: it crashed, or exceeded its CPU time or memory."""


class HelperStuck(HelperLost):
    """The helper did not reply in time, was stopped, or the helper that should have forked it was. It was killed."""


class Helper:
    """A helper process, and our end of its pipe. The process ends when this object is deleted.

    `fork`, `send`, `receive` and `ask` raise `HelperLost` if the process has ended.
    """

    def __init__(self, pipe: Connection, parent: "Helper | None" = None, pid: int | None = None) -> None:
        self.has_begun = False
        """Whether the process has sent its first message, its id. If it has not, its parent may be stuck."""
        self.parent = parent
        """The helper that forks this one. The reference keeps it alive: no helper outlives its parent process."""
        self._pipe = pipe
        self.pid = pid
        self._is_killed = False
        self._end: finalize[[subprocess.Popen[bytes], int], Helper] | None = None
        """Ends and reaps a spawned process."""
        self._was_stopped = False
        self._active_at = time.monotonic()
        """Time of the last message in either direction."""
        with HELPERS.lock:
            HELPERS.alive.add(self)

    @classmethod
    def spawn(cls, function: str) -> "Helper":
        """Start a process that calls `function`, given as `module:name`, with its end of the pipe."""
        ours, theirs = socket.socketpair()
        with theirs:
            arguments = [function, str(theirs.fileno()), str(os.getpid()), json.dumps(sys.path)]
            started = HELPERS.spawner.submit(
                subprocess.Popen,
                [sys.executable, "-I", "-c", PROGRAM.format(__name__), *arguments],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C must not end the process while the server drains
            )
            process = started.result()
        helper = cls(with_timeout(ours), pid=process.pid)
        helper._end = finalize(helper, end, process, os.getpid())
        return helper

    def fork(self) -> "Helper":
        """Return a fork of the process, which must run `serve_forks`. Do not wait for it."""
        if self._is_killed:  # the pipe may still be open
            raise HelperLost("a helper process has ended")
        ours, theirs = socket.socketpair()
        forked = Helper(with_timeout(ours), self)
        with theirs, self._guarded():
            send_handle(self._pipe, theirs.fileno(), None)
        return forked

    @property
    def has_news(self) -> bool:
        """Return whether a message has arrived, or the process has ended."""
        return self._pipe.poll()

    def send(self, message: bytes) -> None:
        self._active_at = time.monotonic()
        with self._guarded():
            self._pipe.send_bytes(message)

    def receive(self, seconds: float = PATIENCE_SECONDS) -> bytes | None:
        """Return the next message. After a timeout of `seconds`, return None."""
        while self._has_message(seconds):
            with self._guarded():
                message = self._pipe.recv_bytes()
            self._active_at = time.monotonic()
            if self.has_begun:
                return message
            self.pid, self.has_begun = int(message), True
        return None

    def ask(self, message: bytes) -> bytes:
        self.send(message)
        while (reply := self.receive()) is None:
            pass
        return reply

    def kill(self) -> None:
        """Kill the process. If its id is not known yet, kill its parent."""
        if self.pid is None:
            assert self.parent
            self.parent.kill()
        elif not self._is_killed:
            self._is_killed = True
            HELPERS.num_killed += 1
            with suppress(OSError):
                os.kill(self.pid, signal.SIGKILL)
            if self._end:
                HELPERS.spawner.submit(self._end)

    @property
    def was_stopped(self) -> bool:
        """Return whether the process, or one that should have forked it, was killed because it was stopped."""
        return self._was_stopped or (self.parent is not None and self.parent.was_stopped)

    def note_stop(self) -> bool:
        """Return whether the process is stopped, as by SIGSTOP. If so, `was_stopped` becomes True."""
        parent_pid = self.parent.pid if self.parent else os.getpid()
        with suppress(OSError):
            self._was_stopped |= f") T {parent_pid} " in Path(f"/proc/{self.pid}/stat").read_text()
        return self._was_stopped

    @property
    def num_bytes(self) -> int:
        """Return the memory in use, without files. Return 0 if it cannot be read."""
        with suppress(OSError):
            return size_of(str(self.pid), is_resident=True)
        return 0

    def _has_message(self, seconds: float) -> bool:
        left = max(0.0, self._active_at + PATIENCE_SECONDS - time.monotonic())
        with self._guarded():
            has_message = self._pipe.poll(min(seconds, left))
        if not has_message and left <= seconds:
            self._give_up()
        return has_message

    def _give_up(self) -> NoReturn:
        self.kill()
        raise HelperStuck("a helper process did not answer in time")

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except BlockingIOError:  # the pipe's timeout
            self._give_up()
        except (EOFError, OSError) as error:
            if self.was_stopped:
                raise HelperStuck("a helper process was stopped") from error
            raise HelperLost("a helper process has ended") from error


class Helpers:
    """All helpers of this process, with their limits."""

    def __init__(self) -> None:
        self.num_killed = 0
        """Number of helpers that were killed because they did not answer, were stopped, or to free memory."""
        self.num_forked_bytes = 0
        """Memory of all forks at the last call of `limit_memory`."""
        self.alive = WeakSet[Helper]()
        self.lock = threading.Lock()
        self.spawner = ThreadPoolExecutor(1, "nvium-spawner")
        """Starts and reaps processes. A helper dies with the thread that started it."""

    def __len__(self) -> int:
        return len(self.alive)

    def kill_stopped(self) -> None:
        """Kill stopped helpers, so that others replace them. Their forks die with them."""
        with self.lock:
            alive = list(self.alive)
        for helper in [helper for helper in alive if helper.note_stop()]:
            helper.kill()

    def limit_memory(self) -> None:
        """While all forks together exceed `MAX_FORKED_BYTES`, kill the largest."""
        with self.lock:
            forks = [(helper, helper.parent) for helper in self.alive if helper.parent]
        sizes = {helper: max(0, helper.num_bytes - parent.num_bytes) for helper, parent in forks}
        self.num_forked_bytes = left = sum(sizes.values())
        for helper in sorted(sizes, key=lambda helper: -sizes[helper]):
            if left > MAX_FORKED_BYTES:
                helper.kill()
                left -= sizes[helper]


HELPERS = Helpers()
os.register_at_fork(after_in_child=lambda: HELPERS.__dict__.update(Helpers().__dict__))


def with_timeout(end_of_pair: socket.socket) -> Connection:
    """Wrap our end of a pipe. If it cannot be written or read for `PATIENCE_SECONDS`, it raises `BlockingIOError`."""
    timeout = struct.pack("ll", int(PATIENCE_SECONDS), 0)
    for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
        end_of_pair.setsockopt(socket.SOL_SOCKET, option, timeout)
    return Connection(end_of_pair.detach())


def end(process: subprocess.Popen[bytes], owner: int) -> None:
    """Kill a spawned helper, unless this process is a fork of the owner."""
    if os.getpid() == owner:
        process.kill()
        with suppress(subprocess.TimeoutExpired):
            process.wait(PATIENCE_SECONDS)


# The rest of this module runs in the helpers.


def main() -> None:
    """Run a helper. The arguments are a function, the descriptor of the pipe and the id of the parent process."""
    function, descriptor, parent = sys.argv[1:]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    module, _, name = function.partition(":")
    run(getattr(import_module(module), name), Connection(int(descriptor)), int(parent))


def run(work: Callable[[Connection], None], pipe: Connection, parent: int) -> None:
    die_with(parent)
    with suppress(EOFError, OSError):  # the other end of the pipe has closed
        pipe.send_bytes(str(os.getpid()).encode())
        work(pipe)


def serve_forks(pipe: Connection, work: Callable[[Connection], None]) -> None:
    """Fork for each pipe that arrives through `pipe`, and call `work` with it in the fork."""
    with suppress(RuntimeError):  # the message has no pipe: the other end has closed
        while True:
            forked, parent = Connection(recv_handle(pipe)), os.getpid()
            if os.fork() == 0:
                try:
                    pipe.close()
                    run(work, forked, parent)
                finally:
                    os._exit(0)
            forked.close()


def die_with(parent: int) -> None:
    """Let the kernel kill this process when its parent dies."""
    with suppress(AttributeError):  # macOS
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(0)


def limit_cpu_time(seconds: float) -> None:
    """Let SIGPROF kill this process after `seconds` more of CPU time. 0 removes the limit."""
    signal.setitimer(signal.ITIMER_PROF, seconds)


def limit_memory(num_bytes: int) -> None:
    """Limit the address space to `num_bytes` more than now, where the system can."""
    with suppress(OSError, ValueError):  # macOS
        resource.setrlimit(resource.RLIMIT_AS, (size_of("self") + num_bytes,) * 2)


def size_of(pid: str, *, is_resident: bool = False) -> int:
    """Return a process's address space in bytes, or its resident memory without files."""
    size, resident, shared, *_ = map(int, Path(f"/proc/{pid}/statm").read_bytes().split())
    return (resident - shared if is_resident else size) * resource.getpagesize()
