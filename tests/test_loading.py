"""The name of a loaded model."""

from pathlib import Path

import pytest

from nvium_core.loading import model_name


@pytest.mark.parametrize(
    ("folder", "is_run", "name"),
    [("runs/foxes/model", True, "foxes"), ("foxes/model", False, "model"), ("runs/foxes", True, "foxes")],
)
def test_a_model_of_a_training_run_has_the_name_of_the_run(
    tmp_path: Path, folder: str, is_run: bool, name: str
) -> None:
    path = tmp_path / folder
    path.mkdir(parents=True)
    if is_run:
        (path.parent / "recipe.json").write_text("{}")
    assert model_name(path) == name


def test_a_hub_name_is_shortened_to_its_last_part() -> None:
    assert model_name(Path("someone/foxes-1b")) == "foxes-1b"
