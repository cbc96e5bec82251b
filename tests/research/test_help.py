import runpy
import sys
from pathlib import Path

import pytest

import research

FOLDER = Path(research.__file__).parent


def test_every_command_has_help_and_a_line_in_the_readme(monkeypatch, capsys):
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    commands = [path.stem for path in sorted(FOLDER.glob("*.py")) if '"__main__"' in path.read_text(encoding="utf-8")]
    assert len(commands) > 10
    for name in commands:
        monkeypatch.setattr(sys, "argv", [name, "--help"])
        monkeypatch.delitem(sys.modules, f"research.{name}", raising=False)
        with pytest.raises(SystemExit) as stop:
            runpy.run_module(f"research.{name}", run_name="__main__")
        assert stop.value.code == 0, name
        assert "usage" in capsys.readouterr().out.lower(), name
        assert f"`{name}`" in readme, name
