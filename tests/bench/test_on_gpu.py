"""The list of what is to be measured on a GPU: every command is one that exists, and what is done is not done again."""

import json
import subprocess
import time
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from nvium_core.bench import on_gpu
from nvium_core.cli import app

SCRATCH = Path("scratch")


@pytest.mark.parametrize("is_tiny", [False, True])
def test_every_command_is_understood(is_tiny: bool) -> None:
    parts = list(on_gpu.parts("cuda", SCRATCH, is_tiny=is_tiny))
    names = [part.name for part in parts]
    assert len(names) == len(set(names))
    commands = [(*part.command, *(("--json", "x.json") if part.writes_json else ())) for part in parts]
    for command in [*commands, *(part.served for part in parts if part.served)]:
        if command[: len(on_gpu.NVIUM)] == on_gpu.NVIUM:
            name, *arguments = command[len(on_gpu.NVIUM) :]
            known = get_command(app).commands[name]  # type: ignore[attr-defined]
            assert known.make_context(name, arguments).params
        else:
            assert find_spec(command[command.index("-m") + 1])


def test_all_parts_end_in_half_an_hour_and_come_in_the_order_of_their_worth() -> None:
    parts = list(on_gpu.parts("cuda", SCRATCH, is_tiny=False))
    assert len(parts) == 17
    assert sum(part.seconds for part in parts) <= 30 * 60
    kinds = [part.name.split("-")[0] for part in parts]
    assert list(dict.fromkeys(kinds)) == [
        "tests",
        "gain",
        "sequences",
        "profile",
        "dense",
        "http",
        "training",
        "determinism",
    ]
    timed = [part.command for part in parts if "--seconds" in part.command]
    assert all(
        int(part.command[part.command.index("--seconds") + 1]) < part.seconds for part in parts if part.command in timed
    )


def test_a_part_ends_when_its_seconds_are_over() -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        on_gpu.finished((on_gpu.PYTHON, "-c", "import time; time.sleep(60)"), time.monotonic() + 0.2)


def test_what_is_done_is_not_done_again_and_what_failed_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ran: list[str] = []

    def stand_in(command: tuple[str, ...], **_: Any) -> subprocess.CompletedProcess[str]:
        ran.append(" ".join(command))
        if "profile" in command and len(ran) < 20:
            raise subprocess.CalledProcessError(1, command, "said", "why")
        if "--json" in command:
            Path(command[-1]).write_text('{"found": 1}')
        return subprocess.CompletedProcess(command, 0, "said", "")

    monkeypatch.setattr(on_gpu.subprocess, "run", stand_in)
    monkeypatch.setattr(on_gpu, "served", lambda *_: nullcontext())
    file = tmp_path / "gpu.json"
    arguments = ["--file", str(file), "--tiny", "--device", "cpu"]
    names = {part.name for part in on_gpu.parts("cpu", SCRATCH, is_tiny=True)}
    assert on_gpu.main(arguments) == 1
    assert json.loads(file.read_text()).keys() == names - {"profile"}
    num_commands = len(ran)
    assert on_gpu.main(arguments) == 1
    assert len(ran) == num_commands + 1
    ran += [""] * 20
    assert on_gpu.main(arguments) == 0
    assert json.loads(file.read_text()).keys() == names
    assert json.loads(file.read_text())["tests"] == {"lines": ["said"]}
    assert on_gpu.main([*arguments, "--list"]) == 0


def test_a_part_without_its_packages_is_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(on_gpu, "find_spec", lambda name: None if name == "uvicorn" else name)
    assert on_gpu.main(["--file", str(tmp_path / "gpu.json"), "--only", "http"]) == 1
    assert capsys.readouterr().out == "http: left out, as uvicorn cannot be imported\n"


def test_a_server_that_ends_is_not_waited_for(tmp_path: Path) -> None:
    command = (on_gpu.PYTHON, "-c", "raise SystemExit('no such model')")
    with pytest.raises(subprocess.CalledProcessError) as raised, on_gpu.served(command, tmp_path / "log"):
        pass
    assert "no such model" in raised.value.stderr
