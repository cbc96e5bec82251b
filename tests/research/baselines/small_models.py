"""Small random models of each kind."""

from nvium_core import NviumForCausalLM
from nvium_core.model.config import even_exit_layers, univium_config
from research.baselines.calm import CalmForCausalLM, build_calm
from tests.random_models import randomized, small_config


def small_univium(num_layers: int = 4, seed: int = 0, vocab_size: int = 17) -> NviumForCausalLM:
    config = univium_config(small_config([num_layers], vocab_size=vocab_size))
    return randomized(NviumForCausalLM(config).double().eval(), seed)


def small_calm(num_layers: int = 6, num_exits: int = 3, seed: int = 0, vocab_size: int = 17) -> CalmForCausalLM:
    """Scale the head such that probabilities above and below one half are both common."""
    model = build_calm(small_config(even_exit_layers(num_layers, num_exits), vocab_size=vocab_size))
    return randomized(model.double().eval(), seed, spread=1.5)
