"""`python -m server.replicas.reaper FOLDER`: kills the Ray processes left behind by a gateway that was killed.

The reaper waits until its standard input closes, which means that the gateway has ended. If the gateway wrote `GOODBYE`
before, the gateway ended normally and the reaper does nothing.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

GOODBYE = b"."
ROUNDS, ROUND_SECONDS = 20, 0.5
"""Kill repeatedly, because the processes may be starting further processes."""


@contextmanager
def reaper_of(folder: str) -> Iterator[None]:
    """Start the reaper. If this process dies while the context is open, the reaper kills the session's processes.

    `folder` is the Ray session's folder, which all processes of the session have on their command line.
    """
    command = [sys.executable, "-m", "server.replicas.reaper", folder]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)  # noqa: S603 (our own)
    assert process.stdin
    try:
        yield
    finally:
        with suppress(OSError):
            process.stdin.write(GOODBYE)
            process.stdin.close()
        process.wait()


def processes_of(folder: str) -> Iterator[int]:
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdecimal() and folder.encode() in (entry / "cmdline").read_bytes():
                yield int(entry.name)


def main() -> None:
    folder = sys.argv[1]
    if sys.stdin.buffer.read():
        return
    for _ in range(ROUNDS):
        for pid in processes_of(folder):
            if pid != os.getpid():
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(ROUND_SECONDS)


if __name__ == "__main__":
    main()
