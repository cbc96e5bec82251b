"""A run's folder, which belongs to one run at a time, and says by which recipe it was made."""

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nvium_core.training.errors import TrainingError
from nvium_core.training.recipes.recipe import Recipe

RECIPE_FILE = "recipe.json"


@contextmanager
def owned(folder: Path) -> Iterator[None]:
    """Make the folder, and keep other runs out while it lasts. Raises `TrainingError` if it cannot be had."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "lock").open("w")
    except OSError as error:
        raise TrainingError(f"{folder}: cannot be written ({error})") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise TrainingError(f"{folder}: another run is using it") from error
        yield


def write_recipe(recipe: Recipe, folder: Path) -> None:
    """For people and for evaluations to read; a run is resumed by what its checkpoint says."""
    (folder / RECIPE_FILE).write_text(json.dumps(asdict(recipe), indent=2) + "\n", encoding="utf-8")


def read_recipe(folder: Path) -> dict[str, Any]:
    """The fields of the recipe that a folder's run was made by; none where no run was."""
    path = folder / RECIPE_FILE
    fields: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return fields
