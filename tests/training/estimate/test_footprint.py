"""Estimated bytes beside those that autograd keeps, and beside the peak of a real process."""

import os
import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from nvium_core import NviumForCausalLM
from nvium_core.training.data.windows import packed_batch
from nvium_core.training.estimate.footprint import (
    Pass,
    activation_bytes,
    checkpoint_bytes,
    chunked_head_bytes,
    footprint,
    head_bytes,
    held_head_bytes,
    optimizer_bytes,
)
from nvium_core.training.objective.cross_entropy import CHUNK_ROWS, MAX_LOGITS_HELD
from nvium_core.training.objective.loss import batch_losses
from nvium_core.training.optimizer import optimizers
from nvium_core.training.recipes.catalogue import RECIPES, recipe_named
from nvium_core.training.recipes.parameters import num_parameters
from nvium_core.training.recipes.recipe import Recipe
from nvium_core.training.train import TrainingRun
from tests.training.small_runs import options, small_recipe, start

ROWS = 2048


def model_of(recipe: Recipe) -> NviumForCausalLM:
    return NviumForCausalLM(recipe.shape.config(recipe.shape.vocab_size, end_token=0))


def kept_bytes(recipe: Recipe, dtype: torch.dtype) -> int:
    """What autograd keeps of one pass, weights apart: every storage once."""
    model, context = model_of(recipe), recipe.shape.context
    known = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    window = torch.randint(1, recipe.shape.vocab_size, (ROWS // context, context + 1))
    autocast = nullcontext() if dtype is torch.float32 else torch.autocast("cpu", dtype)
    with autocast, saved_tensors_hooks(keep, lambda tensor: tensor):
        batch_losses(model, packed_batch(window[:, :-1], window[:, 1:], end_token=0))
    return sum(tensor.untyped_storage().nbytes() for place, tensor in kept.items() if place not in known)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("tiny", []),
        ("tiny-dense", []),
        ("tiny", ["shape.num_layers=8", "shape.num_kv_heads=1", "shape.context=64", "short_context=64"]),
    ],
)
def test_activations_are_what_autograd_keeps(name: str, settings: list[str], dtype: torch.dtype) -> None:
    recipe = recipe_named(name, settings)
    each = Pass(rows=ROWS, context=recipe.shape.context, dtype=dtype)
    logits = ROWS * recipe.shape.num_exits * recipe.shape.vocab_size * 4
    cast_weights = 0 if dtype is torch.float32 else footprint(recipe, each).weights - 4 * num_parameters(recipe)
    estimated = ROWS * activation_bytes(recipe, each) + logits + cast_weights
    assert estimated == pytest.approx(kept_bytes(recipe, dtype), rel=0.03)


PEAK = """
import re
from pathlib import Path

import torch

from nvium_core.model.nvium import NviumForCausalLM
from nvium_core.training.data.windows import packed_batch
from nvium_core.training.objective.loss import batch_losses
from nvium_core.training.recipes.catalogue import recipe_named

shape = recipe_named("tiny", []).shape
model = NviumForCausalLM(shape.config(shape.vocab_size, end_token=0))

def peak_after_a_pass(windows):
    tokens = torch.randint(1, shape.vocab_size, (windows, shape.context + 1))
    batch = packed_batch(tokens[:, :-1], tokens[:, 1:], end_token=0)
    batch_losses(model, batch).mix.backward()
    return 1024 * int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])

before = peak_after_a_pass(1)
model.train().activation_checkpointing_enable()
print(peak_after_a_pass(32) - before)
model.activation_checkpointing_disable()
print(peak_after_a_pass(32) - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads a process's peak from /proc")
def test_the_peak_of_a_real_pass_is_near_the_estimate() -> None:
    """Without the heap's fragments, since every tensor is mapped alone.

    A checkpointed pass never holds a layer's activations and the most logits at the same time, as is estimated.
    """
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True, env=environment)
    sparing, whole = (
        footprint(recipe_named("tiny", []), Pass(rows=32 * 128, context=128, checkpointing=checkpointing))
        for checkpointing in (True, False)
    )
    found_sparing, found_whole = map(int, done.stdout.split())
    assert found_whole == pytest.approx(whole.activations + whole.head, rel=0.1)
    assert found_sparing == pytest.approx(sparing.activations + sparing.head, rel=0.3)


@pytest.mark.parametrize("name", ["tiny", "tiny-dense"])
@pytest.mark.parametrize("muon_rate", [0.0, 0.02])
def test_the_optimisers_bytes_are_those_of_its_state(name: str, muon_rate: float) -> None:
    recipe = recipe_named(name, [f"optimizer.muon_rate={muon_rate}"])
    model = model_of(recipe)
    found = optimizers(model, 1e-3, recipe.optimizer)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for optimizer in found:
        optimizer.step()
    held = [value for optimizer in found for state in optimizer.state.values() for value in state.values()]
    assert optimizer_bytes(recipe) == pytest.approx(sum(tensor.nbytes for tensor in held), rel=0.02)


def test_a_checkpoint_takes_what_is_estimated(tmp_path_factory: pytest.TempPathFactory) -> None:
    recipe, run_options = small_recipe(), options(tmp_path_factory.mktemp("run") / "folder")
    run: TrainingRun = start(recipe, run_options)
    run.train_step(run.batches_of(0))
    run.save()
    size = (run_options.folder / "state.pt").stat().st_size
    assert size == pytest.approx(checkpoint_bytes(recipe), rel=0.3)


def test_few_logits_are_held_and_many_made_in_chunks() -> None:
    shape = recipe_named("paper-24x768", []).shape
    few, many = (Pass(rows=rows, context=1024) for rows in (1024, 4096))
    assert 1024 * shape.vocab_size <= MAX_LOGITS_HELD < 4096 * shape.vocab_size
    assert head_bytes(shape, few) == held_head_bytes(shape, few)
    assert head_bytes(shape, many) == chunked_head_bytes(shape, many) < held_head_bytes(shape, many) / 5


def test_chunks_do_not_grow_with_the_rows() -> None:
    shape = recipe_named("paper-24x768", []).shape
    sizes = {chunked_head_bytes(shape, Pass(rows=rows, context=1024)) for rows in (CHUNK_ROWS, 2**14, 2**17)}
    assert len(sizes) == 1


@pytest.mark.parametrize("name", RECIPES)
def test_checkpointing_spares_memory_in_every_recipe(name: str) -> None:
    recipe = recipe_named(name, [])
    context = recipe.shape.context
    whole, sparing = (Pass(rows=context, context=context, checkpointing=again) for again in (False, True))
    assert activation_bytes(recipe, sparing) < activation_bytes(recipe, whole)
