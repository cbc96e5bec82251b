"""Small random models of each kind, and batches of random windows."""

import torch

from nvium_core import NviumForCausalLM
from nvium_core.model.config import even_exit_layers, univium_config
from nvium_core.training.data.windows import Batch, packed_batch
from nvium_core.training.objective.objective import Phase
from research.baselines.calm import CalmForCausalLM, build_calm
from research.baselines.layerskip import LayerSkipForCausalLM, build_layerskip
from tests.random_models import randomized, small_config


def small_univium(num_layers: int = 4, seed: int = 0, vocab_size: int = 17) -> NviumForCausalLM:
    config = univium_config(small_config([num_layers], vocab_size=vocab_size))
    return randomized(NviumForCausalLM(config).double().eval(), seed)


def small_calm(num_layers: int = 6, num_exits: int = 3, seed: int = 0, vocab_size: int = 17) -> CalmForCausalLM:
    """Scale the head such that probabilities above and below one half are both common."""
    model = build_calm(small_config(even_exit_layers(num_layers, num_exits), vocab_size=vocab_size))
    return randomized(model.double().eval(), seed, spread=1.5)


def small_layerskip(seed: int = 0) -> LayerSkipForCausalLM:
    """Build a LayerSkip of four layers with an early exit after two, in training mode."""
    return randomized(build_layerskip(small_config([2, 4])).double().train(), seed)


def foreseeing(model: NviumForCausalLM, from_layer: int) -> NviumForCausalLM:
    """Scale down the upper layers, so drafts are often accepted."""
    with torch.no_grad():
        for layer in model.model.layers[from_layer:]:
            layer.self_attn.o_proj.weight *= 0.1
            layer.mlp.down_proj.weight *= 0.1
    return model


def small_batch(num_windows: int = 3, length: int = 20, seed: int = 0) -> Batch:
    """Draw windows of about two documents each; end-of-text is 0."""
    generator = torch.Generator().manual_seed(seed)
    window_BT = torch.randint(1, 17, (num_windows, length + 1), generator=generator)
    window_BT[:, length // 2] = 0
    return packed_batch(window_BT[:, :-1], window_BT[:, 1:], end_token=0)


def phase(step: int = 0, progress: float = 0.0) -> Phase:
    return Phase(step=step, progress=progress, alpha=torch.zeros(()), beta=torch.zeros(()))
