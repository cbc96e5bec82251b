import numpy as np
import torch

from nvium_core.training.chat.examples import Example
from research import router_inputs
from tests.random_models import random_model


def test_rows_have_the_models_losses_and_the_kl_of_the_last_exit():
    model, tokens = random_model([1, 2, 4]), np.arange(9) % 7
    rows = router_inputs.rows_of(model, [Example(tokens, np.arange(9) > 3)])
    with torch.no_grad():
        logits_TEV = model(torch.from_numpy(tokens[None, :-1]), output_exit_logits=True).exit_logits[0, 3:]
    log_TEV = logits_TEV.log_softmax(-1)
    torch.testing.assert_close(rows.nll, -log_TEV[torch.arange(5), :, torch.from_numpy(tokens[4:])])
    torch.testing.assert_close(rows.top_two, log_TEV[:, :2].sort(-1, descending=True).values[..., :2])
    last_TEV = log_TEV[:, -1:].expand(-1, 2, -1)
    expected = torch.nn.functional.kl_div(log_TEV[:, :2], last_TEV, log_target=True, reduction="none").sum(-1)
    torch.testing.assert_close(rows.kl.squeeze(-1), expected)


def test_an_input_that_tells_the_better_exit_lowers_the_price(monkeypatch):
    monkeypatch.setattr(router_inputs, "RATE", 0.01)
    noise = torch.Generator().manual_seed(0)
    is_sure_R = torch.rand(6000, generator=noise) < 0.5
    nll = torch.stack((torch.where(is_sure_R, 1.0, 4.0), torch.ones(6000)), 1)
    told = is_sure_R[:, None, None].float()
    state = torch.randn(6000, 1, 4, generator=noise)
    rows = router_inputs.Rows(state, torch.cat((told, -told), -1), torch.zeros_like(told), nll)
    by_input = {each["input"]: each for each in router_inputs.compare(rows, rows, [2, 4])}
    assert 0 < by_input["state and top two"]["0.8"] < 5
    assert by_input["state"]["0.8"] > 20
