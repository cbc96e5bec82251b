"""What a loaded model is called."""

from pathlib import Path

import pytest

from nvium_core.loading import model_name


@pytest.mark.parametrize(
    ("folder", "is_run", "name"),
    [("runs/foxes/model", True, "foxes"), ("foxes/model", False, "model"), ("runs/foxes", True, "foxes")],
)
def test_a_model_of_a_run_is_called_as_the_run_is(tmp_path: Path, folder: str, is_run: bool, name: str) -> None:
    path = tmp_path / folder
    path.mkdir(parents=True)
    if is_run:
        (path.parent / "recipe.json").write_text("{}")
    assert model_name(path) == name


def test_a_name_on_the_hub_has_its_last_part() -> None:
    assert model_name(Path("someone/foxes-1b")) == "foxes-1b"
