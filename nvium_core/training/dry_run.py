"""Estimate a run's parameters, FLOPs, tokens, time and memory. Time and memory are estimated from one training step.

A dry run reads no text and writes nothing. Its tokens and weights are random.
"""

import resource
import time
from dataclasses import dataclass, replace
from datetime import timedelta

import numpy as np
import torch
from rich.table import Table
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from nvium_core.model.flops import flops_per_token
from nvium_core.training.data.windows import PackedStream
from nvium_core.training.objective.beta import BetaSettings
from nvium_core.training.options import RunOptions
from nvium_core.training.recipes.parameters import num_parameters
from nvium_core.training.recipes.recipe import Recipe
from nvium_core.training.train import TrainingRun

FIRST = "0"
PREFIXES = ("", "k", "M", "G", "T", "P", "E", "Z")


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The cost of a run. `peak_bytes` is None if no training step was measured."""

    recipe: Recipe
    flops: float
    seconds: float
    peak_bytes: int | None


def dry_run(recipe: Recipe, options: RunOptions, flops_per_second: float | None = None) -> Estimate:
    """Estimate a run from one training step or, if given, from `flops_per_second` without building the model."""
    flops = training_flops(recipe, options.checkpoint_activations)
    if flops_per_second is not None:
        return Estimate(recipe=recipe, flops=flops, seconds=flops / flops_per_second, peak_bytes=None)
    rows = pass_rows(recipe, options)
    run = run_on_random_tokens(recipe, replace(options, compile=False), rows)
    seconds = timed_step(run)
    pass_flops = rows * token_flops(recipe, recipe.short_context, options.checkpoint_activations)
    peak = peak_bytes(torch.device(options.device))
    return Estimate(recipe=recipe, flops=flops, seconds=seconds * flops / pass_flops, peak_bytes=peak)


def training_flops(recipe: Recipe, checkpointing: bool = False) -> float:
    """Return the FLOPs of a whole run, computed without building the model (paper, section on FLOPs).

    As in the paper, every token attends to the whole window, and a backward pass counts as two forward passes.
    Activation checkpointing adds a forward pass through the layers.
    """
    long_tokens = round(recipe.total_tokens * recipe.long_context_share)
    windows = {recipe.short_context: recipe.total_tokens - long_tokens}
    windows[recipe.shape.context] = windows.get(recipe.shape.context, 0) + long_tokens
    return sum(tokens * token_flops(recipe, context, checkpointing) for context, tokens in windows.items())


def token_flops(recipe: Recipe, context: int, checkpointing: bool = False) -> float:
    """Return the FLOPs of training on one token, in windows of `context` tokens."""
    shape = recipe.shape
    forward = flops_per_token(shape.config(shape.vocab_size, end_token=0), context)
    return 3 * forward.total + (forward.layers + forward.attention if checkpointing else 0)


def pass_rows(recipe: Recipe, options: RunOptions) -> int:
    """Return the tokens per forward pass: as many short windows as `tokens_per_step` and `rows_per_pass` allow."""
    window = recipe.short_context
    return max(1, min(recipe.tokens_per_step, options.rows_per_pass) // window) * window


def peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def run_on_random_tokens(recipe: Recipe, options: RunOptions, tokens_per_step: int) -> TrainingRun:
    vocab_size = recipe.shape.vocab_size
    draws = np.random.default_rng(0)
    tokens = draws.integers(1, min(vocab_size, 2**16), 4 * tokens_per_step + 1).astype(np.uint16)
    words = models.WordLevel({str(token): token for token in range(vocab_size)}, unk_token=FIRST)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), eos_token=FIRST)
    stream = PackedStream(tokens, end_token=0)
    return TrainingRun(from_scratch(recipe, tokens_per_step), options, tokenizer, stream)


def timed_step(run: TrainingRun) -> float:
    started = time.perf_counter()
    run.train_step(run.batches_of(run.step))
    return time.perf_counter() - started


def from_scratch(recipe: Recipe, tokens_per_step: int) -> Recipe:
    """Return the recipe with this step size, random initial weights and short windows only."""
    return replace(
        recipe,
        initial=None,
        tokenizer="any",
        text="documents",
        tokens_per_step=tokens_per_step,
        total_tokens=100 * tokens_per_step,
        long_context_share=0.0,
        beta=BetaSettings(initial=recipe.beta.initial),
    )


def table(estimate: Estimate) -> Table:
    recipe, shape = estimate.recipe, estimate.recipe.shape
    exits = ", ".join(map(str, shape.exit_depths))
    parameters = num_parameters(recipe.shape)
    shown = Table("resource", "estimate")
    shown.add_row("parameters", f"{parameters:,}: {shape.num_layers} layers × {shape.width}, exits after {exits}")
    shown.add_row(
        "text",
        f"{quantity(recipe.total_tokens)} tokens, {recipe.total_tokens / parameters:.2g} per parameter, in "
        f"{recipe.num_steps:,} steps of {recipe.tokens_per_step:,}",
    )
    per_token = token_flops(recipe, recipe.short_context)
    shown.add_row("compute", f"{quantity(estimate.flops)}FLOP, {quantity(per_token)}FLOP per token")
    rate, tokens_per_second = estimate.flops / estimate.seconds, recipe.total_tokens / estimate.seconds
    shown.add_row(
        "time",
        f"{timedelta(seconds=round(estimate.seconds))} at {quantity(rate)}FLOP/s, {tokens_per_second:,.0f} tokens/s",
    )
    if estimate.peak_bytes:
        shown.add_row("memory", f"{quantity(estimate.peak_bytes)}B peak in one pass; --rows-per-pass limits it")
    return shown


def quantity(number: float) -> str:
    power = 0
    while number >= 999.5 and power < len(PREFIXES) - 1:
        number, power = number / 1000, power + 1
    return f"{number:.3g} {PREFIXES[power]}"
