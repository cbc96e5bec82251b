from collections.abc import Iterator

import pytest
import torch

from nvium_core.training.loop import TrainingLoop
from tests.training.small_runs import finished, options, small_recipe, start


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    return finished(start(small_recipe(), options(tmp_path_factory.mktemp("whole") / "run")))


@pytest.fixture(autouse=True, scope="module")
def rare_checkpoints() -> Iterator[None]:
    """Save every four steps. A tenth of so short a run is one step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainingLoop, "tenth", 4)
        yield
