import pytest
import torch

from tests.training.small_runs import finished, options, small_recipe, start


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    return finished(start(small_recipe(), options(tmp_path_factory.mktemp("whole") / "run")))
