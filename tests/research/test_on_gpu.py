from importlib.util import find_spec
from pathlib import Path

import pytest
from typer.main import get_command

from nvium_core.cli import app
from research import on_gpu

SCRATCH = Path("scratch")


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
