import json
import multiprocessing
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
from typer.main import get_command

from nvium_core.bench.figures import provenance
from nvium_core.cli import app
from research import on_gpu

FAILS = "import pathlib, sys; pathlib.Path(sys.argv[2]).write_text('[1]'); sys.exit(1)"
HANGS = "import time; time.sleep(10**6)"


@pytest.mark.parametrize("is_tiny", [False, True])
def test_every_command_parses(is_tiny):
    parts = list(on_gpu.parts("cuda", Path("scratch"), is_tiny=is_tiny))
    assert len({part.name for part in parts}) == len(parts)
    commands = [(*part.command, *(("--json", "x.json") if part.writes_json else ())) for part in parts]
    for module, *arguments in [*commands, *(part.served for part in parts if part.served)]:
        assert find_spec(module)
        if module == on_gpu.NVIUM:
            name, *options = arguments
            assert get_command(app).commands[name].make_context(name, options).params


@pytest.mark.parametrize(("code", "seconds", "points"), [(FAILS, 600, [1]), (HANGS, 0, None)])
def test_a_part_that_ends_early_keeps_its_points(code, seconds, points, tmp_path, monkeypatch):
    monkeypatch.setattr(on_gpu, "multiprocessing", multiprocessing.get_context("spawn"))
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "ends_early.py").write_text(code)
    part = on_gpu.Part("ends early", ("ends_early",), seconds)
    found = on_gpu.run(part, tmp_path, tmp_path / "log", time.monotonic() + 600)
    assert (found and found["points"]) == points


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_parts_run_on_a_cpu_with_small_models(tmp_path):
    file = tmp_path / "gpu.json"
    command = (sys.executable, "-m", "research.on_gpu", "--tiny", "--device", "cpu", "--file", str(file))
    run = subprocess.run(command, check=False, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    found = [name for name in json.loads(file.read_text()) if name not in provenance()]
    assert found == [part.name for part in on_gpu.parts("cpu", tmp_path, is_tiny=True)]
