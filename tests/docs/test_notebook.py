"""The notebook has its outputs, and its imports work. Running it would take a quarter of an hour."""

import json

from tests.docs.pages import ROOT

CELLS = json.loads((ROOT / "docs" / "first-hour.ipynb").read_text(encoding="utf-8"))["cells"]
CODE = [cell for cell in CELLS if cell["cell_type"] == "code"]


def test_every_cell_was_run_one_shows_an_image_and_the_imports_work():
    outputs = [output for cell in CODE for output in cell["outputs"]]
    assert [cell["execution_count"] for cell in CODE] == list(range(1, len(CODE) + 1))
    assert not [output for output in outputs if output["output_type"] == "error"]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    lines = [line for cell in CODE for line in "".join(cell["source"]).splitlines()]
    names: dict[str, object] = {}
    exec("\n".join(line for line in lines if line.startswith(("import ", "from "))), names)
    assert names.keys() > {"__builtins__"}
