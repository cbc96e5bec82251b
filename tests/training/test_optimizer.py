import pytest

from nvium_core import NviumForCausalLM
from nvium_core.training.optimizer import OptimizerSettings, optimizers, parameter_groups, split_parameters
from tests.random_models import small_config


def small_model() -> NviumForCausalLM:
    return NviumForCausalLM(small_config([1, 2], attention_bias=True))


def names_of(model: NviumForCausalLM) -> dict[int, str]:
    return {id(parameter): name for name, parameter in model.named_parameters()}


def test_norms_biases_and_embeddings_are_not_decayed():
    names = names_of(model := small_model())
    decayed, undecayed = parameter_groups(model, list(model.parameters()), weight_decay=0.1)
    assert (decayed["weight_decay"], undecayed["weight_decay"]) == (0.1, 0.0)
    for parameter in decayed["params"]:
        assert parameter.dim() == 2 and not any(word in names[id(parameter)] for word in ("norm", "bias", "embed"))
    for parameter in undecayed["params"]:
        assert any(word in names[id(parameter)] for word in ("norm", "bias", "embed"))
    assert sorted(names) == sorted(id(p) for p in [*decayed["params"], *undecayed["params"]])


def test_muon_trains_the_matrices_between_the_embedding_and_the_head():
    names = names_of(model := small_model())
    matrices, rest = ([names[id(p)] for p in part] for part in split_parameters(model))
    assert all(name.endswith("weight") and "norm" not in name for name in matrices)
    assert {"lm_head.weight", "model.embed_tokens.weight", "exits.0.router.head.weight"} <= set(rest)
    trained = {"exits.0.router.fc1.weight", "exits.1.adapter.up.weight", "model.layers.0.mlp.up_proj.weight"}
    assert trained <= set(matrices)
    assert sorted(matrices + rest) == sorted(names.values())


def test_every_parameter_is_in_one_group_with_its_maximum_rate():
    model = small_model()
    created = optimizers(model, 0.004, OptimizerSettings(muon_rate=0.02))
    groups = [group for optimizer in created for group in optimizer.param_groups]
    assert [group["lr"] for group in groups] == [0.02, 0.004, 0.004]
    assert sorted(id(p) for group in groups for p in group["params"]) == sorted(id(p) for p in model.parameters())
    assert len(optimizers(model, 0.004, OptimizerSettings())) == 1


@pytest.mark.parametrize("betas", [(0.9,), (0.9, 1.0), (0.9, 0.95, 0.99)])
def test_adamws_betas_must_be_two_numbers_below_one(betas):
    with pytest.raises(ValueError, match="betas must be two numbers"):
        OptimizerSettings(betas=betas)
