"""The notebook runs from its first cell to its last, and was saved without what it printed."""

import json
from pathlib import Path

import pytest

from tests.docs.pages import ROOT

CELLS = json.loads((ROOT / "docs" / "first-hour.ipynb").read_text(encoding="utf-8"))["cells"]
CODE = [cell for cell in CELLS if cell["cell_type"] == "code"]


def test_every_cell_runs_and_the_trained_model_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    names: dict[str, object] = {}
    try:
        for cell in CODE:
            exec("".join(cell["source"]), names)
    finally:
        if "server" in names:
            names["server"].kill()  # type: ignore[attr-defined]
    printed = capsys.readouterr().out.splitlines()
    assert "first [" in "\n".join(printed)
    assert printed[-1] == "0"


def test_it_holds_no_output() -> None:
    assert [cell["outputs"] for cell in CODE] == [[]] * len(CODE)
