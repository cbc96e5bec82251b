"""The notebook and README show what the bundled model writes today, and the notebook's imports work."""

import json
import shlex

from tests.docs.pages import ROOT, blocks

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


def test_the_story_of_readme_is_the_models_and_begins_the_notebooks(server):
    [command] = [block.text for block in blocks("README.md") if block.text.startswith("curl")]
    body = shlex.split(command)[-1]
    text = server.http.post("/v1/completions", content=body).json()["choices"][0]["text"]
    assert f'"text": "{text}"' in (ROOT / "README.md").read_text(encoding="utf-8")
    assert "".join(CODE[0]["outputs"][0]["text"]).startswith(text)
