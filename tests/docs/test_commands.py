"""Every command on every page is run, as it stands or made shorter, or is named here with the reason why not.

What is not run is still held to what it calls (`real`), and so are commands within lines of prose.
"""

import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from loadtest.__main__ import main as run_loadtest
from nvium_core import cli
from tests.docs import pages, real
from tests.docs.pages import ROOT, Code
from tests.docs.scratch import furnish
from tests.docs.shell import Command, commands
from tests.server.live_server import LiveServer, wait_until
from tests.server.server_process import free_port

ADDRESS = "http://127.0.0.1:8000"

RUN = {
    "curl": "--fail",
    "mkdir": "",
    "nvium compare": "",
    "nvium evaluate": "--trials 1",
    "nvium evaluate-baseline": "--trials 1 --prompts 1",
    "nvium generate": "",
    "nvium plan": "",
    "nvium recipes": "",
    "nvium serve": "",
    "nvium train": "--dry-run --flops-per-second 1e12",
    "nvium train tiny --data c4/": "--no-compile --set total_tokens=4096",
    "python -m loadtest --base-url": "--requests 8 --warm-up 0 --max-tokens 8",
    "python -m loadtest --rate 6,12,18,24,60": "--requests 20 --warm-up 0 --max-tokens 4",
    "python -m loadtest --rate": "--requests 2 --warm-up 0 --max-tokens 8",
}
"""By how a command begins, the longest beginning counting: what is added so that it takes seconds."""

NOT_RUN = {
    "docker": "needs Docker; profiles, services and what these are asked are checked",
    "helm": "needs a cluster; what is set is checked, and tests/deploy/test_helm_chart.py renders the chart",
    "kubectl": "needs a cluster",
    "lm_eval": "has an environment of its own; `make conformance` runs it",
    ".venv/bin/python": "of the environment that `make` makes; these tests run in it",
    "make": "installs, and runs the tests; that the target is there is checked",
    "nvium bench": "takes minutes; experiment and options are checked, tests/bench/ has all of them, small",
    "nvium evaluate MODEL --data valid.txt.xz --tasks": "lm_eval need not be installed; `make conformance` has it",
    "nvium chat": "wants somebody to talk to; tests/test_terminal.py and tests/test_cli.py have conversations",
    "nvium evaluate-chat": "a hundred conversations take minutes; tests/evaluation/test_chat.py has a few",
    "nvium iso": "measures models of every depth for minutes; tests/evaluation/test_iso.py has tiny ones",
    "python -m nvium_core.training.mean_weights": "wants trained models; see tests/training/test_mean_weights.py",
    "nvium retrofit": "learns for minutes; tests/training/retrofitting/ has a small one",
    "nvium serve --api-keys-file keys.txt --ssl-certfile": "wants a certificate; tests/server/http/test_tls.py has one",
    "nvium serve HuggingFaceTB/SmolLM2-135M-Instruct": "wants the Hub; folders are served here",
    "nvium serve SmolLM2-135M-Instruct-Q4_K_M.gguf": "wants the Hub's file; tests/model/test_gguf.py has others",
    "nvium serve --replicas": "Ray need not be installed; tests/server/replicas/ has real ones",
    "pip install": "changes this environment; that our extra is there is checked",
    "python -m loadtest.overhead": "needs another process for minutes; see tests/loadtest/test_overhead.py",
    "python -m nvium_core.bench.on_gpu": "needs a GPU for an hour; its commands are checked in tests/bench/",
    "python -m pytest -m cuda": "needs a GPU; that the marker is there is checked",
    "serve run": "Ray need not be installed; that the application is there is checked",
    "torchrun": "needs several devices; recipe and options are checked",
}
"""By how a command begins: why it is not run."""

NO_COMMANDS = {
    "README.md": ['data: {"id":"cmpl-…"'],
    "docs/chat.md": ["What the system says.", "<|endoftext|>System:"],
    "docs/deploying.md": ["NVIUM_MODEL="],
    "docs/monitoring.md": ["histogram_quantile"],
    "docs/replicas.md": ["client ── gateway"],
}
"""Blocks that are no commands, by how they begin."""

BLOCKS = [block for page in pages.PAGES for block in pages.blocks(page)]
SHELL = [
    block
    for block in BLOCKS
    if not block.is_python and not block.first_line.startswith(tuple(NO_COMMANDS.get(block.page, ["\0"])))
]
COMMANDS = [(block, command) for block in SHELL for command in commands(block.text)]


def way(command: Command) -> str | None:
    """How the command begins, of all beginnings that are known."""
    begins = [begin for begin in RUN | NOT_RUN if f"{command.text} ".startswith(f"{begin} ")]
    return max(begins, key=len, default=None)


def unknown(found: list[tuple[Code, Command]]) -> list[str]:
    return [f"{block.place}: {command.text}" for block, command in found if way(command) is None]


def test_every_command_is_run_or_named_with_the_reason_why_not() -> None:
    assert unknown(COMMANDS) == []


def test_a_command_that_nobody_has_run_or_named_is_found() -> None:
    block = Code("docs/new.md", 3, "nvium sing --loud\n")
    assert unknown([(block, command) for command in commands(block.text)]) == ["docs/new.md:3: nvium sing --loud"]


def test_nothing_is_said_of_commands_that_no_page_has_any_more() -> None:
    assert {way(command) for _, command in COMMANDS} == RUN.keys() | NOT_RUN.keys()
    shown = [block for block in BLOCKS if block not in SHELL and not block.is_python]
    assert len(shown) == sum(map(len, NO_COMMANDS.values()))


@pytest.mark.parametrize("block", SHELL, ids=lambda block: block.place)
def test_a_command_calls_what_there_is(block: Code) -> None:
    for command in commands(block.text):
        real.check(command)


PROGRAMS = ("nvium ", "make ", "docker ", "helm ", "pip ", "python ")
SPANS = [span for page in pages.PAGES for span in pages.spans(page) if span.text.startswith(PROGRAMS)]


@pytest.mark.parametrize("span", SPANS, ids=lambda span: span.place)
def test_a_command_within_a_line_calls_what_there_is(span: Code) -> None:
    if span.text.startswith("nvium COMMAND"):
        return
    for command in commands(span.text):
        real.check(command)


@pytest.mark.parametrize(
    "line",
    [
        "nvium serve --prot 9000",
        "nvium sing",
        "nvium bench songs --repeats 5",
        "nvium train no-such-recipe --data a.txt",
        "nvium train small --data a.txt --set no.such=1",
        "nvium serve --cors-origins nonsense",
        "torchrun -m nvium_core.cli train paper-24x768 --data c4.txt.xz --sharding thin",
        "make sandwich",
        "make serve NO_SUCH=1",
        "pip install 'nvium[nothing]'",
        "pip install nvium-0.0.1-py3-none-any.whl",
        "docker compose --profile nobody up",
        "docker compose --profile loadtest run --rm loadtest --speed 3",
        "helm install tales deploy/helm/nvium --set autoscaling.maximum=8",
        "helm install tales deploy/helm/other",
        "python -m loadtest --speed 3",
        "python -m loadtest.overhead --speed 3",
        "python deploy/monitoring/draw.py a.png --hours 5",
        "python no/such.py",
        "python -m pytest -m quantum",
        "serve run server.ray_app:no_such",
    ],
)
def test_a_command_that_calls_what_there_is_not_is_found(line: str) -> None:
    [command] = commands(line)
    with pytest.raises((Exception, SystemExit)):
        real.check(command)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reader")
    furnish(folder)
    return folder


def to_run() -> list[Command]:
    """None twice."""
    return list(dict.fromkeys(command for _, command in COMMANDS if way(command) in RUN))


@pytest.mark.parametrize("command", to_run(), ids=lambda command: command.text)
def test_a_command_runs(
    command: Command,
    folder: Path,
    server: LiveServer,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folder)
    words = [word.replace(ADDRESS, server.url) for word in command.words] + RUN[str(way(command))].split()
    if command.text.startswith("nvium serve"):
        starts_and_ends(words[1:])
    elif words[0] == "nvium":
        assert run_nvium(monkeypatch, words) == 0, capfd.readouterr()
    elif words[:3] == ["python", "-m", "loadtest"]:
        assert run_loadtest([*words[3:], "--base-url", server.url]) == 0, capfd.readouterr()
    else:
        subprocess.run(words, check=True, timeout=60)


def run_nvium(monkeypatch: pytest.MonkeyPatch, words: list[str]) -> object:
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as ending:
        cli.main()
    return ending.value.code


def starts_and_ends(words: list[str]) -> None:
    """A server that is ready, and goes when it is told to; on a port of its own, for this machine only."""
    port = free_port()
    asked = [*words, "--host", "127.0.0.1", "--port", str(port)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-m", "nvium_core.cli", *asked], env=environment)
    try:
        wait_until(lambda: is_ready(port), seconds=120)
        process.terminate()
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        process.wait()


def is_ready(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/readyz").status_code == 200
    except httpx.TransportError:
        return False
