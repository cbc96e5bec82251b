"""What is refused before Ray is started, and what a killed gateway leaves."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from server.replicas.reaper import named, reaper_of
from tests.server.live_server import wait_until

HOLDS_A_REAPER = """
import sys, time
from server.replicas.reaper import reaper_of
with reaper_of(sys.argv[1]):
    print("ready", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def left_over(tmp_path: Path) -> subprocess.Popen[bytes]:
    """A process that has the folder on its command line."""
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", str(tmp_path)])


def test_what_a_killed_front_leaves_of_its_ray_is_ended(tmp_path: Path, left_over: subprocess.Popen[bytes]) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLDS_A_REAPER, str(tmp_path)], stdout=subprocess.PIPE) as gateway:
        assert gateway.stdout
        assert gateway.stdout.readline() == b"ready\n"
        gateway.kill()
    assert left_over.wait(timeout=30) < 0
    wait_until(lambda: not list(named(str(tmp_path))), seconds=30)


def test_a_front_that_says_goodbye_has_nothing_ended(tmp_path: Path, left_over: subprocess.Popen[bytes]) -> None:
    with reaper_of(str(tmp_path)):
        assert left_over.pid in named(str(tmp_path))
    assert left_over.poll() is None
    assert os.getpid() not in named(str(tmp_path))
    left_over.kill()
    left_over.wait()


@pytest.mark.skipif(find_spec("ray") is None or torch.cuda.is_available(), reason="needs Ray, and no GPU")
def test_replicas_that_would_wait_for_gpus_are_refused_at_once_in_one_line() -> None:
    command = [sys.executable, "-m", "nvium_core.cli", "serve", "--replicas", "2", "--device", "cuda"]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1)
    assert "replicas: 2 of them need a GPU each, and this machine has 0" in ended.stderr
