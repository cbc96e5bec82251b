"""LayerSkip's training (Elhoushi et al., arXiv 2404.16710): layer dropout, and losses of one head at many depths.

The model is a plain Llama; `speculation` decodes with it.

Shapes: B windows, T tokens, D width, L layers. Depth 6 means after six layers.
"""

import os
import zlib
from collections.abc import Collection, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from nvium_core.model.causal_lm import NviumForCausalLM
from nvium_core.model.config import NviumConfig, univium_config
from nvium_core.model.nvium import Nvium
from nvium_core.training.data.windows import Batch
from nvium_core.training.objective.cross_entropy import head_nll
from nvium_core.training.objective.objective import ObjectiveResult, Phase, counted_mean
from nvium_core.training.recipes.recipe import Recipe

MAX_DROPOUT = 0.3
"""The last layer's dropout at the end of training, as in the N-vium paper."""

DRAFTS = ((6, 12), (4, 12), (4, 8), (6, 5), (2, 5), (2, 8))
"""Exit layers and draft lengths in the N-vium paper, whose LayerSkip has early exits after layers 2, 4 … 22 of 24."""


class LayerSkipForCausalLM(NviumForCausalLM):
    """A Llama with additional training losses after the layers `early_exits`. It is saved as a Llama."""

    def __init__(self, config: NviumConfig, early_exits: Sequence[int] = ()) -> None:
        super().__init__(config)
        self.early_exits = tuple(early_exits)

    def save_pretrained(  # type: ignore[override]
        self, save_directory: str | os.PathLike[str], **options: Any
    ) -> None:
        """Save as a `LlamaForCausalLM`, which `NviumForCausalLM` can load. Pass `options` to transformers."""
        as_llama(self).save_pretrained(save_directory, **options)


def as_llama(model: Nvium) -> LlamaForCausalLM:
    """Convert a univium to transformers' class. The weights are shared, not copied."""
    names = {field.name for field in fields(LlamaConfig)} - {"architectures"}
    config = LlamaConfig(**{name: value for name, value in model.config.to_dict().items() if name in names})
    with torch.device("meta"):
        llama = LlamaForCausalLM(config)
    tensors = model.state_dict()
    tensors["model.norm.weight"] = tensors.pop("exits.0.norm.weight")
    llama.load_state_dict(tensors, assign=True)
    return llama


def build_layerskip(config: NviumConfig) -> LayerSkipForCausalLM:
    """Build a Llama with the shape and early exits of an N-vium's configuration, and random weights."""
    return LayerSkipForCausalLM(univium_config(config), (config.exit_layers or [])[:-1])


# The enabled exits change during training, and PyTorch would recompile at each change.
@torch.compiler.disable  # type: ignore[untyped-decorator]  # PyTorch has no types for it
def objective(model: LayerSkipForCausalLM, batch: Batch, phase: Phase) -> ObjectiveResult:
    """In training mode, compute Σ ẽ(t, l) CE_l (LayerSkip, equation 5). Else compute a Llama's loss.

    `mix_loss` is the last exit's cross-entropy. `dropped_share` is the share of rows that skip a layer.
    """
    num_layers, num_windows = model.config.num_hidden_layers, len(batch.inputs)
    weights, kept_LB = {num_layers: 1.0}, torch.ones(num_layers, num_windows, dtype=torch.bool)
    if model.training:
        weights = loss_weights([*model.early_exits, num_layers], phase.progress)
        kept_LB = kept_layers(batch, phase.step, dropout(num_layers, phase.progress))
    kept_LB = kept_LB.to(batch.inputs.device)
    losses = exit_losses(model, batch, kept_LB, weights)
    loss = torch.stack([weights[depth] * loss for depth, loss in losses.items()]).sum()
    return ObjectiveResult(loss, {"mix_loss": losses[num_layers].detach(), "dropped_share": (~kept_LB).float().mean()})


def dropout(num_layers: int, progress: float) -> list[float]:
    """Return p_l = S · D_l · p_max (equation 2). D rises over layers, S over time, each as 2^x − 1 from 0 to 1."""
    in_time = 2**progress - 1
    return [in_time * (2 ** (layer / max(1, num_layers - 1)) - 1) * MAX_DROPOUT for layer in range(num_layers)]


def loss_weights(depths: Sequence[int], progress: float) -> dict[int, float]:
    """Return the enabled exits' weights ẽ (equation 6, e_scale 1) by depth. The weights sum to 1."""
    *early, last = depths
    scales = {depth: sum(range(depth)) for depth in active(early, last, progress)}
    scales[last] = max(1, sum(range(last)))
    return {depth: scale / sum(scales.values()) for depth, scale in scales.items()}


def active(early: Sequence[int], num_layers: int, progress: float) -> list[int]:
    """Return C, the early exits that the gradual curriculum enables now, from the deepest to the shallowest.

    All are enabled after half of the training. The last exit always is.
    """
    return [depth for depth in early if progress >= (num_layers - depth) / (2 * num_layers)]


def kept_layers(batch: Batch, step: int, dropout: list[float]) -> Tensor:
    """Draw which layers each window passes, as bool [L, B]. A draw depends only on the step and the window's tokens."""
    digests = [zlib.crc32(window_T.tobytes()) for window_T in batch.inputs.numpy(force=True)]
    uniforms_BL = np.stack([np.random.default_rng((step, digest)).random(len(dropout)) for digest in digests])
    return torch.from_numpy(uniforms_BL >= np.array(dropout)).T


def exit_losses(model: NviumForCausalLM, batch: Batch, kept_LB: Tensor, depths: Collection[int]) -> dict[int, Tensor]:
    """Return the shared head's cross-entropy by depth. A window that skips a layer keeps its state."""
    h_BTD = model.model.embed_tokens(batch.inputs)
    rotary, attend = model.model.rotary_emb(batch.positions, h_BTD.dtype), batch.attention()
    losses = dict[int, Tensor]()
    for layer, kept_B in enumerate(kept_LB):
        passed_BTD = model.model.run(h_BTD, [layer], rotary, attend)
        h_BTD = torch.where(kept_B[:, None, None], passed_BTD, h_BTD)
        if layer + 1 in depths:
            _, (o_BTD,) = model.exit_outputs([h_BTD])
            losses[layer + 1] = counted_mean(head_nll(o_BTD, model.lm_head.weight, batch.targets), batch)
    return losses


def model(recipe: Recipe, vocab_size: int, end_token: int) -> LayerSkipForCausalLM:
    return build_layerskip(recipe.shape.config(vocab_size, end_token))
