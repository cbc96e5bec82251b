"""Checks before Ray starts, and the cleanup after a gateway was killed."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from server.replicas.reaper import processes_of, reaper_of
from tests.server.live_server import wait_until

GATEWAY = """
import sys, time
from server.replicas.reaper import reaper_of
with reaper_of(sys.argv[1]):
    print("ready", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def ray_process(tmp_path: Path) -> subprocess.Popen[bytes]:
    """A process with the session's folder on its command line."""
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", str(tmp_path)])


def test_the_reaper_kills_the_ray_processes_of_a_killed_gateway(
    tmp_path: Path, ray_process: subprocess.Popen[bytes]
) -> None:
    with subprocess.Popen([sys.executable, "-c", GATEWAY, str(tmp_path)], stdout=subprocess.PIPE) as gateway:
        assert gateway.stdout
        assert gateway.stdout.readline() == b"ready\n"
        gateway.kill()
    assert ray_process.wait(timeout=30) < 0
    wait_until(lambda: not list(processes_of(str(tmp_path))), seconds=30)


def test_the_reaper_kills_nothing_after_an_orderly_stop(tmp_path: Path, ray_process: subprocess.Popen[bytes]) -> None:
    with reaper_of(str(tmp_path)):
        assert ray_process.pid in processes_of(str(tmp_path))
    assert ray_process.poll() is None
    assert os.getpid() not in processes_of(str(tmp_path))
    ray_process.kill()
    ray_process.wait()


@pytest.mark.skipif(find_spec("ray") is None or torch.cuda.is_available(), reason="needs Ray, and no GPU")
def test_more_replicas_than_gpus_are_refused_in_one_line() -> None:
    command = [sys.executable, "-m", "nvium_core.cli", "serve", "--replicas", "2", "--device", "cuda"]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1)
    assert "replicas: 2 replicas need 2 GPUs, this machine has 0" in ended.stderr
