"""Runs other people's programs: those of this environment, and those of the one that `make conformance` makes."""

import os
import subprocess
from collections.abc import Collection, Sequence
from pathlib import Path

import pytest

from tests.conformance.serving import ROOT

REQUIREMENTS = Path(__file__).parent / "requirements.txt"
AGENTS = Path(__file__).parent / "agents.txt"
CLIENTS = ROOT / ".venv-conformance"
NODE_MODULES = CLIENTS / "node" / "node_modules"
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HAYSTACK_TELEMETRY_ENABLED": "False"}
OFFLINE |= {"OMP_NUM_THREADS": "1", "NO_COLOR": "1"}


def run(
    command: Sequence[str | Path],
    *,
    seconds: float,
    cwd: Path = ROOT,
    environment: dict[str, str] | None = None,
    exit_codes: Collection[int] = (0,),
) -> str:
    """Return what a program wrote, which is also shown if the test fails. Raises `TimeoutExpired`."""
    own, together = os.environ | OFFLINE | (environment or {}), {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    finished = subprocess.run(command, cwd=cwd, env=own, text=True, timeout=seconds, check=False, **together)
    print(finished.stdout)
    assert finished.returncode in exit_codes
    return finished.stdout


def pinned(package: str, requirements: Path = REQUIREMENTS) -> str:
    """The version of a package in the environment of `make conformance`."""
    pins = dict(line.split("==") for line in requirements.read_text(encoding="utf-8").splitlines() if "==" in line)
    return pins[package]


def installed(program: Path) -> Path:
    """A program that `make` has to have put there."""
    if not program.exists():
        pytest.skip(f"{program.name} is not there; `make test` and `make conformance` install it")
    return program
