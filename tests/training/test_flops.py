import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from nvium_core import NviumForCausalLM
from nvium_core.training.data.windows import packed_batch
from nvium_core.training.dry_run import token_flops, training_flops
from nvium_core.training.recipes.catalogue import recipe_named
from tests.training.objective.test_loss import outcome_of


@pytest.mark.parametrize("name", ["tiny", "tiny-dense"])
def test_training_costs_what_pytorch_counts(name):
    recipe = recipe_named(name, [])
    shape = recipe.shape
    model = NviumForCausalLM(shape.config(shape.vocab_size, end_token=0))
    window = torch.randint(1, shape.vocab_size, (2, shape.context + 1))
    with FlopCounterMode(display=False) as counter:
        outcome_of(model, packed_batch(window[:, :-1], window[:, 1:], end_token=0)).loss.backward()
    attention = 3 * shape.num_layers * 4 * shape.context * shape.width  # PyTorch counts none on a CPU
    counted = counter.get_total_flops() / window[:, 1:].numel() + attention
    assert token_flops(recipe, shape.context) == pytest.approx(counted, rel=0.01)


def test_long_windows_count_for_their_share_of_the_tokens():
    recipe = recipe_named("tiny", ["short_context=32", "long_context_share=0.25"])
    short, long = (token_flops(recipe, context) for context in (32, 128))
    assert training_flops(recipe) == pytest.approx(1_000_000 * (0.75 * short + 0.25 * long), rel=1e-6)
    assert training_flops(recipe_named("tiny", [])) == 1_000_000 * long


def test_activation_checkpointing_costs_another_pass_through_the_layers():
    recipe = recipe_named("paper-48x1536", [])
    assert 1.2 < training_flops(recipe, checkpointing=True) / training_flops(recipe) < 4 / 3
