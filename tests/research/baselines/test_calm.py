import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from nvium_core import CheckpointError, Engine, EngineConfig, SamplingParams
from nvium_core.engine.device.native.backend import NativeBackend
from research.baselines.calm import CalmConfig, CalmForCausalLM
from tests.engine.device.native.compiling import needs_compiler
from tests.engine.test_exactness import VOCAB_SIZE, check, configs, requests, served
from tests.research.baselines.small_models import small_calm, small_univium

TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
MODEL = small_calm(vocab_size=VOCAB_SIZE)


@needs_compiler
@given(configs, st.lists(requests(), min_size=1, max_size=5))
def test_tokens_exits_and_scores_of_the_cpp_kernels_equal_algorithm_1_by_every_rule(config, plan):
    engine = Engine(MODEL, config)
    assert isinstance(engine.runner.backend, NativeBackend)
    check(MODEL, served(engine, plan), plan)


@pytest.mark.parametrize("schedule", ["whole", "sweep"])
def test_an_early_exit_has_no_probability_also_if_it_emits(schedule):
    params = SamplingParams(max_tokens=30, seed=1, ignore_eos=True, sampling="confidence", threshold=0.5)
    (found,) = Engine(MODEL, EngineConfig(schedule=schedule)).generate([[1, 2, 3]], params)
    assert {*found.exits} == {1, 2, 3}
    assert found.exit_probabilities == [float(exit_ == 3) for exit_ in found.exits]


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


def test_a_model_of_another_kind_is_refused(tmp_path):
    small_univium().save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="model_type must be 'calm', got 'nvium'"):
        CalmForCausalLM.from_pretrained(tmp_path)
