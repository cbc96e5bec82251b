"""Routers and heads in native calls against the model's own."""

import pytest
import torch

from nvium_core.engine import native
from nvium_core.engine.junction import PlainExits
from tests.random_models import random_model

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.06}

pytestmark = pytest.mark.skipif(native.native_library() is None, reason="no C++ compiler here")


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("exit_layers", [[1, 2, 3], [2]])
@pytest.mark.parametrize("num_rows", [1, 3, 8])
@torch.inference_mode()
def test_routes_and_logits_are_the_models(dtype: torch.dtype, exit_layers: list[int], num_rows: int) -> None:
    model = random_model(exit_layers, dtype=dtype, width=48, vocab_size=50)
    plain, fast = PlainExits(model), native.NativeExits(model)
    h_FD = torch.randn(num_rows, 48, generator=torch.Generator().manual_seed(num_rows)).to(dtype)
    for block in range(len(exit_layers)):
        (x_FD, log_w_F2), (fast_x_FD, fast_log_w_F2) = plain.route(block, h_FD), fast.route(block, h_FD)
        wider = torch.promote_types(dtype, torch.float32)
        torch.testing.assert_close(fast_x_FD, x_FD.to(wider), rtol=0, atol=TOLERANCE[dtype])
        torch.testing.assert_close(fast_log_w_F2, log_w_F2.to(wider), rtol=0, atol=TOLERANCE[dtype])
        logits_RV, fast_logits_RV = plain.logits(block, x_FD), fast.logits(block, fast_x_FD)
        torch.testing.assert_close(fast_logits_RV, logits_RV.to(wider), rtol=0, atol=3 * TOLERANCE[dtype])


@torch.inference_mode()
def test_an_answer_does_not_depend_on_who_else_asks() -> None:
    model = random_model([1, 2], dtype=torch.float32, width=48, vocab_size=50)
    exits = native.NativeExits(model)
    h_FD = torch.randn(7, 48)
    x_FD, log_w_F2 = exits.route(0, h_FD)
    logits_RV = exits.logits(0, x_FD)
    for row in range(7):
        x_1D, log_w_12 = exits.route(0, h_FD[row : row + 1])
        assert torch.equal(log_w_12[0], log_w_F2[row])
        assert torch.equal(exits.logits(0, x_1D)[0], logits_RV[row])


@torch.inference_mode()
def test_what_is_not_finite_stays_so() -> None:
    exits = native.NativeExits(random_model([1, 2]))
    _, log_w_F2 = exits.route(0, torch.full((1, 16), torch.nan, dtype=torch.float64))
    assert log_w_F2.isnan().all()
