from pathlib import Path

import pytest

from nvium_core.loading import model_name


@pytest.mark.parametrize(
    ("folder", "is_run", "name"),
    [("runs/foxes/model", True, "foxes"), ("foxes/model", False, "model"), ("runs/foxes", True, "foxes")],
)
def test_a_model_has_the_name_of_its_training_run_or_the_last_part_of_its_own(tmp_path, folder, is_run, name):
    path = tmp_path / folder
    path.mkdir(parents=True)
    if is_run:
        (path.parent / "recipe.json").write_text("{}")
    assert model_name(path) == name
    assert model_name(Path("someone/foxes-1b")) == "foxes-1b"
