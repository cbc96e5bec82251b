"""A grown model computes the same function, and all of its new weights train."""

import torch

from nvium_core.model.causal_lm import NviumForCausalLM
from nvium_core.model.config import NviumConfig
from research.grow import grown


def small_model() -> NviumForCausalLM:
    torch.manual_seed(1)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = NviumConfig(
        vocab_size=50, num_hidden_layers=2, head_dim=8, exit_layers=[1, 2], rms_norm_eps=1e-12, **sizes
    )
    model = NviumForCausalLM(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def test_a_grown_model_computes_the_same_function_and_all_new_weights_train() -> None:
    model = small_model()
    larger = grown(model, layers=4, width=24, heads=3, mlp_width=40).double().eval()
    ids = torch.randint(50, (2, 12), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(larger(ids).logits, model(ids).logits, rtol=1e-6, atol=1e-6)
    optimizer = torch.optim.SGD(larger.parameters(), lr=1e-3)
    for _ in range(2):
        optimizer.zero_grad()
        larger(ids, labels=ids).loss.backward()
        optimizer.step()
    for name, parameter in larger.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().amax(-1).gt(0).any(), name
