import pytest
import torch

from nvium_core import NviumForCausalLM
from nvium_core.training.optimizer import (
    Muon,
    OptimizerSettings,
    optimizers,
    orthogonalized,
    parameter_groups,
    split_parameters,
)
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
    assert [group["maximum_lr"] for group in groups] == [0.02, 0.004, 0.004]
    assert sorted(id(p) for group in groups for p in group["params"]) == sorted(id(p) for p in model.parameters())
    assert len(optimizers(model, 0.004, OptimizerSettings())) == 1


@pytest.mark.parametrize("shape", [(24, 24), (12, 40), (40, 12)])
def test_an_orthogonalised_matrix_keeps_its_directions_and_has_singular_values_near_one(shape):
    drawn = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0))
    left, _, right = torch.linalg.svd(drawn, full_matrices=False)
    found = orthogonalized(left * torch.linspace(0.1, 1, min(shape)) @ right, torch.float32)
    inner = left.mT @ found @ right.mT
    singular = inner.diagonal(dim1=-2, dim2=-1)
    assert ((singular > 0.5) & (singular < 1.3)).all()
    assert (inner - singular.diag_embed()).abs().max() < 1e-4


def test_muon_equals_pytorchs_up_to_its_bfloat16():
    starts = [torch.randn(20, 30), torch.randn(30, 20), torch.randn(20, 30)]
    ours, theirs = ([torch.nn.Parameter(start.clone()) for start in starts] for _ in range(2))
    steps(Muon(ours, lr=0.02, weight_decay=0.1), ours)
    steps(torch.optim.Muon(theirs, lr=0.02, weight_decay=0.1), theirs)
    for mine, other, start in zip(ours, theirs, starts, strict=True):
        assert (mine - other).norm() < 0.02 * (other - start).norm()


def steps(optimizer: torch.optim.Optimizer, matrices: list[torch.nn.Parameter]) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(5):
        for matrix in matrices:
            matrix.grad = torch.randn(matrix.shape, generator=generator)
        optimizer.step()


@pytest.mark.parametrize("betas", [(0.9,), (0.9, 1.0), (0.9, 0.95, 0.99)])
def test_adamws_betas_must_be_two_numbers_below_one(betas):
    with pytest.raises(ValueError, match="betas must be two numbers"):
        OptimizerSettings(betas=betas)
