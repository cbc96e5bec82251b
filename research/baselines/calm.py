"""The model and training of CALM* (Schuster et al., arXiv 2207.07061, as in the N-vium paper).

CALM* is an N-vium without adapters and routers. A row leaves at the first exit where its largest probability is above a
threshold: the engine's `ExitRule.CONFIDENCE`. The engine computes skipped layers later, so their keys and values are
exact, while CALM computes them from a copy of the state at the exit.

Shapes: B windows, T tokens, E exits.
"""

import os
from typing import Any, Self, cast

import torch
from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForCausalLM

from nvium_core.errors import CheckpointError
from nvium_core.model.causal_lm import NviumForCausalLM
from nvium_core.model.checkpoint import resolve_folder
from nvium_core.model.config import NviumConfig
from nvium_core.model.exits import Exit
from nvium_core.training.data.windows import Batch
from nvium_core.training.objective import ObjectiveResult, Phase, counted_mean, token_losses
from nvium_core.training.recipes.recipe import Recipe

THRESHOLDS = (0.9, 0.8, 0.7, 0.6)
"""The thresholds τ in the N-vium paper, whose CALM* model has exits after layers 6, 12, 18 and 24 of 24."""


@strict
class CalmConfig(NviumConfig):
    """Llama's fields and `exit_layers`. Fields of routers and adapters are ignored."""

    model_type = "calm"

    adapter_hidden_size: int | None = 0


class CalmForCausalLM(NviumForCausalLM):
    """A Llama with an RMSNorm for each exit and a shared head. `forward` returns the last exit's logits."""

    config: CalmConfig
    config_class = CalmConfig

    def __init__(self, config: CalmConfig) -> None:
        super().__init__(config)
        for exit_ in self.exits[:-1]:
            cast(Exit, exit_).router = None

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls, folder: str | os.PathLike[str], *, config: CalmConfig | None = None, **options: Any
    ) -> Self:
        """Load a saved folder. Raise `CheckpointError` if a tensor is missing, unexpected or of the wrong shape."""
        return super().from_pretrained(folder, config=config or read_config(folder), **options)


def read_config(folder: str | os.PathLike[str]) -> CalmConfig:
    """Read a configuration. Raise `CheckpointError` if the folder is not a CALM*."""
    path = resolve_folder(folder)
    try:
        values, _ = CalmConfig.get_config_dict(path)
        kind, config = values.pop("model_type", None), CalmConfig(**values)
    except (OSError, TypeError, ValueError, StrictDataclassError) as error:
        raise CheckpointError(f"{path}: {error.__cause__ or error}") from error
    if kind != CalmConfig.model_type:
        raise CheckpointError(f"{path}: model_type must be {CalmConfig.model_type!r}, got {kind!r}")
    return config


def build_calm(config: NviumConfig) -> CalmForCausalLM:
    """Build a CALM* model with the shape and exits of an N-vium's configuration, and random weights."""
    changes = {"adapter_hidden_size": 0, "model_type": CalmConfig.model_type}
    return CalmForCausalLM(CalmConfig.from_dict(config.to_dict() | changes))


def model(recipe: Recipe, vocab_size: int, end_token: int) -> CalmForCausalLM:
    return build_calm(recipe.shape.config(vocab_size, end_token))


def objective(model: CalmForCausalLM, batch: Batch, phase: Phase) -> ObjectiveResult:
    """Compute Σ l_k CE_k / Σ l_k from each exit's cross-entropy CE_k. `mix_loss` is the last exit's cross-entropy."""
    exit_losses_E = counted_mean(token_losses(model, batch)[2], batch)
    depths_E = torch.tensor(model.config.exit_layers, dtype=exit_losses_E.dtype, device=exit_losses_E.device)
    loss = (depths_E * exit_losses_E).sum() / depths_E.sum()
    metric_E = exit_losses_E.detach()
    return ObjectiveResult(loss, {"mix_loss": metric_E[-1], "exit_losses": metric_E})


AutoConfig.register("calm", CalmConfig)
AutoModelForCausalLM.register(CalmConfig, CalmForCausalLM)
