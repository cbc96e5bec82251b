import torch

from nvium_core.model.causal_lm import NviumForCausalLM
from research.grow import grown
from tests.random_models import small_config


def small_model() -> NviumForCausalLM:
    torch.manual_seed(1)
    config = small_config([1, 2], vocab_size=50, num_heads=2, head_dim=8, rms_norm_eps=1e-12)
    model = NviumForCausalLM(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def test_a_grown_model_computes_the_same_function_and_all_new_weights_train():
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
        assert parameter.grad.abs().amax(-1).gt(0).any(), name
