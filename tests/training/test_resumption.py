"""A run is resumed with the recipe and text it was begun with, or told by name what is other."""

from dataclasses import replace
from pathlib import Path

import pytest

from nvium_core.training.errors import TrainingError
from nvium_core.training.options import RunOptions
from tests.training.small_runs import advance, options, small_recipe, start


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> RunOptions:
    """A run stopped after its checkpoint of step 4."""
    run_options = options(tmp_path_factory.mktemp("stopped") / "run")
    advance(start(small_recipe(), run_options), 5)
    return run_options


@pytest.mark.parametrize("setting", ["optimizer.weight_decay=0.2", "answers_only=false", "beta.initial=0.5"])
def test_a_run_is_not_resumed_with_another_recipe(stopped: RunOptions, folder: Path, setting: str) -> None:
    with pytest.raises(TrainingError, match=f"holds a run with other {setting.partition('=')[0]}; choose another"):
        start(small_recipe(setting), replace(stopped, folder=folder))
