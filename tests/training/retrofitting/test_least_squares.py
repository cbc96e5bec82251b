import pytest
import torch

from nvium_core.model.exits import Adapter
from nvium_core.training.retrofitting.least_squares import RowFit, hold_map
from tests.random_models import random_model

WIDTH = 16


def adapter(inner: int) -> Adapter:
    config = random_model([1], width=WIDTH).config
    config.adapter_hidden_size = inner
    return Adapter(config).double()


def rows(number: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(number, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
@pytest.mark.parametrize("inner", [2 * WIDTH, 2 * WIDTH + 3])
def test_an_adapter_of_twice_the_width_is_any_linear_map(inner: int) -> None:
    held, map_DD, x_RD = adapter(inner), rows(WIDTH), rows(50, 1)
    hold_map(held, map_DD)
    torch.testing.assert_close(held(x_RD), x_RD @ map_DD)


@torch.no_grad()
def test_a_narrower_one_is_the_nearest_of_its_rank() -> None:
    held, map_DD = adapter(10), rows(WIDTH)
    hold_map(held, map_DD)
    found = held(torch.eye(WIDTH, dtype=torch.float64))
    rest = map_DD - torch.eye(WIDTH)
    left, sizes, right = torch.linalg.svd(rest)
    torch.testing.assert_close(found - torch.eye(WIDTH), (left[:, :5] * sizes[:5]) @ right[:5])


def test_rows_that_a_map_made_give_the_map_back_however_they_come() -> None:
    map_DD, fit = rows(WIDTH), RowFit(WIDTH)
    for part in rows(400, 1).split(70):
        fit.add(part, part @ map_DD)
    torch.testing.assert_close(fit.solve(), map_DD, rtol=1e-3, atol=1e-3)
