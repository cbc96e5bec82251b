"""Helpers are killed if they do not answer, use too much memory or lose their parent."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from nvium_core.text import sandbox
from nvium_core.text.sandbox import HELPERS, Helper, HelperLost, Helpers, HelperStuck, serve_forks

HERE = __name__


def echo(pipe: Connection) -> None:
    while True:
        pipe.send_bytes(pipe.recv_bytes())


def echoing_forks(pipe: Connection) -> None:
    serve_forks(pipe, echo_with_memory)


def echo_with_memory(pipe: Connection) -> None:
    """Reply to each message, and keep as many bytes as it asks for."""
    kept = []
    while True:
        message = pipe.recv_bytes()
        kept.append(b"x" * int(message))
        pipe.send_bytes(message)


def pid_of(helper: Helper) -> int:
    assert helper.pid is not None
    return helper.pid


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait up to 30 s. Defined here, because the helpers import this module: it must not import the server."""
    ends = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.01)


@pytest.fixture
def forker() -> Helper:
    return Helper.spawn(f"{HERE}:echoing_forks")


@pytest.mark.parametrize("size", [1, 1_000_000])
def test_a_helper_that_stands_still_is_killed_and_counted(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Whether the message fits the pipe or not."""
    monkeypatch.setattr(sandbox, "PATIENCE_SECONDS", 1.0)
    helper = Helper.spawn(f"{HERE}:echo")
    assert helper.receive(0) is None
    monkeypatch.setattr(sandbox, "PATIENCE_SECONDS", 20.0)
    assert helper.ask(b"a") == b"a"
    monkeypatch.setattr(sandbox, "PATIENCE_SECONDS", 1.0)
    before, pid = HELPERS.num_killed, pid_of(helper)
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(HelperStuck):
        helper.ask(b"a" * size)
    assert HELPERS.num_killed == before + 1
    wait_until(lambda: not is_running(pid))


def test_the_parent_of_a_fork_that_does_not_begin_is_killed(monkeypatch: pytest.MonkeyPatch, forker: Helper) -> None:
    assert forker.fork().ask(b"1") == b"1"
    os.kill(pid_of(forker), signal.SIGSTOP)
    monkeypatch.setattr(sandbox, "PATIENCE_SECONDS", 0.1)
    late = forker.fork()
    with pytest.raises(HelperStuck):
        late.ask(b"1")
    assert not late.has_begun
    wait_until(lambda: not is_running(pid_of(forker)))
    with pytest.raises(HelperLost):
        forker.fork()


def test_forks_die_with_their_parent_even_while_stopped(forker: Helper) -> None:
    forked = forker.fork()
    assert forked.ask(b"1") == b"1"
    os.kill(pid_of(forked), signal.SIGSTOP)
    forker.kill()
    wait_until(lambda: not is_running(pid_of(forked)))


def test_a_helper_dies_with_its_object(forker: Helper) -> None:
    forked = forker.fork()
    assert forked.ask(b"1") == b"1"
    pid = pid_of(forked)
    del forked
    wait_until(lambda: not is_running(pid))


def test_the_largest_fork_is_killed_if_all_are_too_large(monkeypatch: pytest.MonkeyPatch, forker: Helper) -> None:
    monkeypatch.setattr(sandbox, "HELPERS", own := Helpers())
    small, large = forker.fork(), forker.fork()
    assert small.ask(b"1000") and large.ask(b"50000000")
    own.limit_memory()
    assert 40_000_000 < own.num_forked_bytes < 100_000_000
    assert large.ask(b"1") == b"1"
    monkeypatch.setattr(sandbox, "MAX_FORKED_BYTES", 30_000_000)
    own.limit_memory()
    with pytest.raises(HelperLost):
        large.ask(b"1")
    assert small.ask(b"1") == b"1"


STOPPED = """
import os, signal
from nvium_core.text.sandbox import Helper
helper = Helper.spawn("tests.text.test_sandbox:echo")
helper.ask(b"a")
os.kill(helper.pid, signal.SIGSTOP)
print(helper.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_stopped_helper_dies_with_a_killed_server() -> None:
    printed = subprocess.run([sys.executable, "-c", STOPPED], capture_output=True, text=True, check=False).stdout
    wait_until(lambda: not is_running(int(printed)))
