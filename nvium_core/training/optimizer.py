"""Optimisers: AdamW for all parameters, or Muon for the matrices inside the network and AdamW for the rest."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer
from transformers import PreTrainedModel

from nvium_core.model.llama import RMSNorm


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """AdamW's and Muon's hyperparameters; the defaults are the paper's.

    `weight_decay` does not apply to norms, biases and embeddings. `muon_rate` 0 disables Muon.
    """

    weight_decay: float = 0.1
    betas: tuple[float, ...] = (0.9, 0.95)
    clip_norm: float = 1.0
    muon_rate: float = 0.0

    def __post_init__(self) -> None:
        if self.weight_decay < 0 or self.clip_norm <= 0 or self.muon_rate < 0:
            raise ValueError("weight_decay and muon_rate must not be negative, and clip_norm must be positive")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must be two numbers in [0, 1), got {self.betas}")


def optimizers(model: PreTrainedModel, rate: float, settings: OptimizerSettings) -> list[Optimizer]:
    """Return AdamW, preceded by Muon if `muon_rate` is set. A group's `lr` is its peak learning rate."""
    matrices, rest = split_parameters(model) if settings.muon_rate else ([], list(model.parameters()))
    groups = parameter_groups(model, rest, settings.weight_decay)
    beta1, beta2 = settings.betas
    created: list[Optimizer] = [AdamW(groups, lr=rate, betas=(beta1, beta2), eps=1e-8, fused=True)]
    if matrices:
        created.insert(0, Muon(matrices, lr=settings.muon_rate, weight_decay=settings.weight_decay))
    return created


def split_parameters(model: PreTrainedModel) -> tuple[list[Tensor], list[Tensor]]:
    """Return the parameters for Muon, and all others.

    Muon gets the matrices of linear layers, except the output head and the routers' heads.
    """
    head = model.get_output_embeddings()
    linear = [module for module in model.modules() if isinstance(module, nn.Linear) and module is not head]
    matrices: list[Tensor] = [layer.weight for layer in linear if layer.out_features > 2]  # routers' heads have 2
    chosen = {id(matrix) for matrix in matrices}
    return matrices, [parameter for parameter in model.parameters() if id(parameter) not in chosen]


def parameter_groups(model: nn.Module, parameters: Sequence[Tensor], weight_decay: float) -> list[dict[str, Any]]:
    """Return matrices with weight decay, and biases, norms and embeddings without weight decay, as in the paper."""
    undecayed = {
        id(parameter)
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if name == "bias" or isinstance(module, RMSNorm | nn.Embedding)
    }
    return [
        {"params": [p for p in parameters if id(p) not in undecayed], "weight_decay": weight_decay},
        {"params": [p for p in parameters if id(p) in undecayed], "weight_decay": 0.0},
    ]
