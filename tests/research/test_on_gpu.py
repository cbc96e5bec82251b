import json
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
from typer.main import get_command

from nvium_core.cli import app
from research import on_gpu

SCRATCH = Path("scratch")
WRITES_AND_HANGS = "import pathlib, sys, time; pathlib.Path(sys.argv[2]).write_text('[1]'); time.sleep(60)"


@pytest.mark.parametrize("is_tiny", [False, True])
def test_every_command_parses(is_tiny):
    parts = list(on_gpu.parts("cuda", SCRATCH, is_tiny=is_tiny))
    assert len({part.name for part in parts}) == len(parts)
    commands = [(*part.command, *(("--json", "x.json") if part.writes_json else ())) for part in parts]
    for command in [*commands, *(part.served for part in parts if part.served)]:
        if command[: len(on_gpu.NVIUM)] == on_gpu.NVIUM:
            name, *arguments = command[len(on_gpu.NVIUM) :]
            known = get_command(app).commands[name]
            assert known.make_context(name, arguments).params
        else:
            assert find_spec(command[command.index("-m") + 1])


def test_a_part_that_is_stopped_keeps_its_points(tmp_path):
    part = on_gpu.Part("hangs", (sys.executable, "-c", WRITES_AND_HANGS), seconds=60)
    found = on_gpu.run(part, tmp_path, tmp_path / "log", time.monotonic() + 1)
    assert found["points"] == [1]
    assert found[on_gpu.STOPPED_AFTER] < 30


@pytest.mark.slow
def test_all_parts_run_on_a_cpu_with_small_models(tmp_path):
    file = tmp_path / "gpu.json"
    assert on_gpu.main(["--tiny", "--device", "cpu", "--file", str(file)]) == 0, file.with_suffix(".log").read_text()
    assert list(json.loads(file.read_text())) == [part.name for part in on_gpu.parts("cpu", tmp_path, is_tiny=True)]
