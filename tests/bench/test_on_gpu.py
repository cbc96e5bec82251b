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


def test_all_parts_but_transformers_end_in_half_an_hour_and_come_in_the_order_of_their_worth() -> None:
    parts = list(on_gpu.parts("cuda", SCRATCH, is_tiny=False))
    kinds = [part.name.split("-")[0] for part in parts]
    assert sum(part.seconds for part, kind in zip(parts, kinds, strict=True) if kind != "generate") <= 30 * 60
    assert list(dict.fromkeys(kinds)) == [
        "tests",
        "gain",
        "sequences",
        "profile",
        "dense",
        "http",
        "training",
        "determinism",
        "generate",
    ]
    timed = [part.command for part in parts if "--seconds" in part.command]
    assert all(
        int(part.command[part.command.index("--seconds") + 1]) < part.seconds for part in parts if part.command in timed
    )


def python(program: str) -> tuple[str, ...]:
    return on_gpu.PYTHON, "-c", program


LATE = "import time; print('begun', flush=True); time.sleep(60)"


def test_a_part_ends_when_its_seconds_are_over_with_all_that_it_has_started(tmp_path: Path) -> None:
    log, started = tmp_path / "log", time.monotonic()
    program = (
        f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {LATE!r}]).pid, flush=True); {LATE}"
    )
    with pytest.raises(subprocess.TimeoutExpired):
        on_gpu.finish(python(program), log, started + 2)
    assert time.monotonic() - started < 30
    (child,) = [int(word) for word in log.read_text().split() if word.isdigit()]
    while Path(f"/proc/{child}").exists() and " Z " not in Path(f"/proc/{child}/stat").read_text():
        assert time.monotonic() - started < 30
        time.sleep(0.05)


def test_what_a_part_said_is_kept_also_if_it_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log"
    failing = on_gpu.Part("failing", python("import sys; print('why'); sys.exit('no')"), 60, writes_json=False)
    assert on_gpu.run(failing, tmp_path, log) is None
    assert "why" in capsys.readouterr().out
    some_failed = python("print('1 failed'); raise SystemExit(1)")
    tests = on_gpu.Part("tests", some_failed, 60, writes_json=False, statuses=(0, on_gpu.SOME_FAILED))
    assert on_gpu.run(tests, tmp_path, log) == {"lines": ["1 failed"]}
    assert [line for line in log.read_text().splitlines() if line] == [
        "=== failing",
        *sorted(["why", "no"], reverse=True),
        "=== tests",
        "1 failed",
    ]


def test_nothing_is_begun_that_may_not_end_in_the_seconds_given(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[str] = []

    def stand_in(part: on_gpu.Part, *_: Any) -> Any:
        ran.append(part.name)
        return {}

    monkeypatch.setattr(on_gpu, "run", stand_in)
    assert on_gpu.main(["--file", str(tmp_path / "gpu.json"), "--seconds", "75"]) == 1
    allowed = {part.name for part in on_gpu.parts("cuda", SCRATCH, is_tiny=False) if part.seconds < 75}
    assert {*ran} == allowed
    assert "http: left for another time, as it may take 200 s" in capsys.readouterr().out


def test_what_is_done_is_not_done_again_and_what_failed_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ran: list[str] = []

    def stand_in(command: tuple[str, ...], log: Path, *_: Any) -> None:
        ran.append(" ".join(command))
        if "profile" in command and len(ran) < 20:
            raise subprocess.CalledProcessError(1, command)
        if "--json" in command:
            Path(command[-1]).write_text('{"found": 1}')
        with log.open("a") as told:
            told.write("said")

    monkeypatch.setattr(on_gpu, "finish", stand_in)
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
    server = on_gpu.served(python("raise SystemExit('no such model')"), tmp_path / "log")
    with pytest.raises(subprocess.CalledProcessError), server:
        pass
    assert "no such model" in (tmp_path / "log").read_text()


def test_a_server_that_does_not_end_loses_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(on_gpu, "END_SECONDS", 0.2)
    monkeypatch.setattr(on_gpu, "wait_until_ready", lambda *_: time.sleep(1))
    with on_gpu.served(python(f"import signal; signal.signal(15, signal.SIG_IGN); {LATE}"), tmp_path / "log"):
        found = "measured"
    assert found == "measured"
