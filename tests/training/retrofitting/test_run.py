import pytest
import torch

from nvium_core.model.exits import Adapter
from nvium_core.training.retrofitting.run import LeastSquares, set_map
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
def test_an_adapter_of_twice_the_width_represents_any_linear_map(inner):
    linear, map_DD, x_RD = adapter(inner), rows(WIDTH), rows(50, 1)
    set_map(linear, map_DD)
    torch.testing.assert_close(linear(x_RD), x_RD @ map_DD)


@torch.no_grad()
def test_a_narrower_adapter_represents_the_nearest_map_of_its_rank():
    linear, map_DD = adapter(10), rows(WIDTH)
    set_map(linear, map_DD)
    found = linear(torch.eye(WIDTH, dtype=torch.float64))
    left, sizes, right = torch.linalg.svd(map_DD - torch.eye(WIDTH))
    torch.testing.assert_close(found - torch.eye(WIDTH), (left[:, :5] * sizes[:5]) @ right[:5])


def test_least_squares_recover_the_map_from_rows_in_parts():
    map_DD, fit = rows(WIDTH), LeastSquares(WIDTH)
    for part in rows(400, 1).split(70):
        fit.add(part, part @ map_DD)
    torch.testing.assert_close(fit.solve(), map_DD, rtol=1e-3, atol=1e-3)
