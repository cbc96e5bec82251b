"""The list of what is to be measured on a GPU: every command is one that exists, and what is done is not done again."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from nvium_core.bench import on_gpu
from nvium_core.cli import app


@pytest.mark.parametrize("is_tiny", [False, True])
def test_every_command_is_understood(is_tiny: bool) -> None:
    names = [part.name for part in on_gpu.parts("cuda", is_tiny=is_tiny)]
    assert len(names) == len(set(names))
    for part in on_gpu.parts("cuda", is_tiny=is_tiny):
        if part.command[: len(on_gpu.NVIUM)] == on_gpu.NVIUM:
            name, *arguments = part.command[len(on_gpu.NVIUM) :]
            command = get_command(app).commands[name]  # type: ignore[attr-defined]
            json = ["--json", "x.json"] if part.writes_json else []
            assert command.make_context(name, [*arguments, *json]).params


def test_what_is_done_is_not_done_again_and_what_failed_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ran: list[str] = []

    def stand_in(command: tuple[str, ...], **_: Any) -> subprocess.CompletedProcess[str]:
        ran.append(" ".join(command))
        fails = "profile" in command and len(ran) < 20
        if "--json" in command and not fails:
            Path(command[-1]).write_text("{}")
        return subprocess.CompletedProcess(command, int(fails), "said", "")

    monkeypatch.setattr(on_gpu.subprocess, "run", stand_in)
    monkeypatch.setattr(on_gpu, "server", lambda *_: on_gpu.nothing())
    arguments = ["--folder", str(tmp_path), "--tiny", "--device", "cpu"]
    assert on_gpu.main(arguments) == 1
    num_parts = len(ran)
    assert num_parts == len(list(on_gpu.parts("cpu", is_tiny=True)))
    assert on_gpu.main(arguments) == 1
    assert len(ran) == num_parts + 1
    ran += [""] * 20
    assert on_gpu.main(arguments) == 0
    assert len({file.name for file in tmp_path.iterdir()}) == num_parts
    assert on_gpu.main([*arguments, "--list"]) == 0
