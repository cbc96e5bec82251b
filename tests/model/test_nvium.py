import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nvium_core import NviumForCausalLM
from nvium_core.model.exits import CONTINUE, EXIT
from nvium_core.model.nvium import NviumOutput
from tests.model.llama_folders import llama_folder, random_llama
from tests.random_models import random_model

INPUT_IDS = torch.randint(17, (2, 12), generator=torch.Generator().manual_seed(7))
EXIT_LAYERS = st.sets(st.integers(1, 5), min_size=1, max_size=4).map(sorted)


def forward(model: NviumForCausalLM) -> NviumOutput:
    return model(INPUT_IDS, labels=INPUT_IDS, output_exit_logits=True)


@settings(max_examples=15, deadline=None)
@given(exit_layers=EXIT_LAYERS, seed=st.integers(0, 1000))
@torch.no_grad()
def test_outputs_are_the_mixture_of_the_exits_and_losses_the_papers_formulas(exit_layers, seed):
    output = forward(random_model(exit_layers, seed=seed))
    p_BTE, pi_BTEV = output.exit_probs, output.exit_logits.softmax(-1)
    torch.testing.assert_close(p_BTE.sum(-1), torch.ones(INPUT_IDS.shape).double())
    torch.testing.assert_close(output.logits.exp(), (p_BTE.unsqueeze(-1) * pi_BTEV).sum(-2))
    p, pi = output.exit_probs[:, :-1], output.exit_logits[:, :-1].softmax(-1)
    num_exits = p.shape[-1]
    target = pi.gather(-1, INPUT_IDS[:, 1:, None, None].expand(*p.shape, 1))[..., 0]
    reached = 1 - torch.cat([torch.zeros_like(p[..., :1]), p.cumsum(-1)[..., :-1]], -1)
    balance = sum(((p / reached)[..., k - 1] - 1 / (num_exits - k + 1)) ** 2 for k in range(1, num_exits))
    torch.testing.assert_close(output.loss, -(p * target).sum(-1).log().mean())
    torch.testing.assert_close(output.exit_losses, -target.log().mean((0, 1)))
    depths = torch.tensor(exit_layers).double() / exit_layers[-1]
    torch.testing.assert_close(output.compute_loss, (p * depths).sum(-1).mean())
    torch.testing.assert_close(output.balance_loss, torch.as_tensor(balance).double().mean())


@pytest.mark.parametrize(("outcome", "exit_", "mean_depth"), [(EXIT, -1, 1), (CONTINUE, 0, 0.25)])
@pytest.mark.parametrize("bias", [-1e4, -math.inf])
def test_routers_that_never_or_always_exit_give_the_last_or_first_exit_and_finite_gradients(
    outcome, exit_, mean_depth, bias
):
    model = random_model([1, 2, 4])
    with torch.no_grad():
        for early in model.exits[:-1]:
            early.router.head.bias[outcome] = bias
    output = forward(model)
    torch.testing.assert_close(output.logits, output.exit_logits[..., exit_, :].log_softmax(-1))
    assert (output.exit_probs[..., exit_] == 1).all()
    assert output.compute_loss == mean_depth
    objective = output.loss + output.balance_loss + output.compute_loss
    objective.backward()
    assert objective.isfinite() and output.logits.isfinite().all()
    for name, parameter in model.named_parameters():
        assert parameter.grad is None or parameter.grad.isfinite().all(), name


@torch.no_grad()
def test_hidden_states_equal_those_of_transformers_llama(tmp_path):
    llama = random_llama()
    model = NviumForCausalLM.from_pretrained(llama_folder(tmp_path, llama), dtype=torch.float32)
    ids = INPUT_IDS % model.config.vocab_size
    output = model(ids, output_hidden_states=True)
    theirs = llama(ids, output_hidden_states=True).hidden_states
    assert len(output.hidden_states) == len(theirs) == model.config.num_hidden_layers + 1
    for ours, their in zip(output.hidden_states[:-1], theirs[:-1], strict=True):  # their last one is normalised
        torch.testing.assert_close(ours, their)
    torch.testing.assert_close(output.logits, model(ids).logits, rtol=0, atol=0)
    assert model(ids).hidden_states is None
