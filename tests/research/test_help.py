import runpy
import sys
from pathlib import Path

import pytest

import research

FOLDER = Path(research.__file__).parent


def test_every_command_has_help_and_a_line_in_the_readme(monkeypatch, capsys):
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    files = [path for path in sorted(FOLDER.rglob("*.py")) if '__name__ == "__main__"' in path.read_text("utf-8")]
    assert len(files) > 10
    for module in (".".join(path.relative_to(FOLDER).with_suffix("").parts) for path in files):
        name = module.removesuffix(".__main__")
        monkeypatch.setattr(sys, "argv", [name, "--help"])
        monkeypatch.delitem(sys.modules, f"research.{module}", raising=False)
        with pytest.raises(SystemExit) as stop:
            runpy.run_module(f"research.{name}", run_name="__main__")
        assert stop.value.code == 0, name
        assert "usage" in capsys.readouterr().out.lower(), name
        assert f"`{name}`" in readme, name
