import torch
from transformers import AutoModelForCausalLM

from research.baselines.calm import CalmConfig, CalmForCausalLM
from tests.research.baselines.small_models import small_calm, small_univium

TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])


@torch.no_grad()
def test_the_forward_pass_equals_that_of_a_llama_with_the_last_exits_norm():
    calm, llama = small_calm(), small_univium(num_layers=6)
    tensors = {name: tensor for name, tensor in calm.state_dict().items() if not name.startswith("exits")}
    llama.load_state_dict(tensors | {"exits.0.norm.weight": calm.state_dict()["exits.2.norm.weight"]})
    output = calm(TOKENS, labels=TOKENS)
    torch.testing.assert_close(output.logits, llama(TOKENS).logits)
    torch.testing.assert_close(output.loss, llama(TOKENS, labels=TOKENS).loss)
    assert output.exit_probs[0, 0].tolist() == [0, 0, 1]


def test_a_saved_model_loads_back_unchanged(tmp_path):
    small_calm().save_pretrained(tmp_path)
    loaded, expected = CalmForCausalLM.from_pretrained(tmp_path), small_calm().state_dict()
    assert isinstance(loaded.config, CalmConfig) and loaded.config.exit_layers == [2, 4, 6]
    assert loaded.state_dict().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.state_dict().items())
    with torch.no_grad():
        assert torch.equal(loaded(TOKENS).logits, small_calm()(TOKENS).logits)
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path)) is CalmForCausalLM
