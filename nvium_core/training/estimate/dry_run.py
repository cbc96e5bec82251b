"""What a run would take: parameters, memory, disk, FLOPs, and time from a few measured steps.

Nothing is written and no text is read. For a model that does not fit, time comes from a given rate.
"""

import os
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from rich.table import Table
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from nvium_core.training.data.windows import PackedStream
from nvium_core.training.estimate.flops import token_flops, training_flops
from nvium_core.training.estimate.footprint import (
    Footprint,
    Pass,
    checkpoint_bytes,
    chunked_head_bytes,
    footprint,
    held_head_bytes,
    model_bytes,
)
from nvium_core.training.objective.beta import BetaSettings
from nvium_core.training.options import RunOptions
from nvium_core.training.precision import fast_dtype
from nvium_core.training.recipes.parameters import num_parameters
from nvium_core.training.recipes.recipe import Recipe
from nvium_core.training.train import TrainingRun

PATIENCE_SECONDS = 10.0
"""Slower steps are timed once, and no larger ones after them."""

LARGER = 4
"""Windows of the larger timed step."""

FIRST = "0"
UNITS = ("", "k", "M", "G", "T", "P", "E", "Z")


@dataclass(frozen=True, kw_only=True)
class Speed:
    """A device's FLOPs per second, and the additional seconds of a weight update."""

    flops_per_second: float
    update_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """`speed` None: not given, and not measured because the run does not fit."""

    recipe: Recipe
    each: Pass
    available_bytes: int
    speed: Speed | None

    @property
    def memory(self) -> Footprint:
        return footprint(self.recipe, self.each)

    @property
    def flops(self) -> float:
        return training_flops(self.recipe, self.each.checkpointing)

    @property
    def seconds(self) -> float | None:
        if self.speed is None:
            return None
        return self.flops / self.speed.flops_per_second + self.recipe.num_steps * self.speed.update_seconds


def dry_run(recipe: Recipe, options: RunOptions, flops_per_second: float | None = None) -> Estimate:
    """On the options' device; its speed is measured there if not given and if the run fits."""
    each = pass_of(recipe, options)
    available = available_bytes(torch.device(options.device))
    speed = None
    if flops_per_second is not None:
        speed = Speed(flops_per_second=flops_per_second)
    elif footprint(recipe, each).total < available:
        speed = measured_speed(recipe, options)
    return Estimate(recipe=recipe, each=each, available_bytes=available, speed=speed)


def pass_of(recipe: Recipe, options: RunOptions) -> Pass:
    """The largest forward pass of a run: full-length windows if there are any."""
    context = recipe.context_at(1.0)
    windows = max(1, min(recipe.tokens_per_step, options.rows_per_pass) // context)
    return Pass(
        rows=windows * context,
        context=context,
        dtype=fast_dtype(torch.device(options.device)),
        checkpointing=options.checkpoint_activations,
    )


MEMORY_FILE = Path("/proc/meminfo")


def available_bytes(device: torch.device) -> int:
    """Memory that can be had now: on Linux with what files' pages would give back."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if MEMORY_FILE.exists():
        kilobytes = dict(line.split()[:2] for line in MEMORY_FILE.read_text().splitlines())
        return int(kilobytes["MemAvailable:"]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def measured_speed(recipe: Recipe, options: RunOptions) -> Speed:
    """From steps of one and of several windows; their difference does not contain fixed costs. Uncompiled."""
    window = recipe.short_context
    full = min(recipe.tokens_per_step, options.rows_per_pass)
    rows = max(window, min(full // window, LARGER) * window)
    flops = token_flops(recipe, window, options.checkpoint_activations)
    seconds = step_seconds(recipe, options, window)
    if rows == window or seconds > PATIENCE_SECONDS:
        return Speed(flops_per_second=window * flops / seconds)
    larger_seconds = step_seconds(recipe, options, rows)
    row_seconds = (larger_seconds - seconds) / (rows - window)
    if row_seconds <= 0:
        return Speed(flops_per_second=rows * flops / larger_seconds)
    return Speed(flops_per_second=flops / row_seconds, update_seconds=max(0.0, seconds - window * row_seconds))


def step_seconds(recipe: Recipe, options: RunOptions, rows: int) -> float:
    """Of random tokens: the fastest of three steps, or the first if it is slow."""
    run = run_on_random_tokens(recipe, replace(options, compile=False), rows)
    first = timed_step(run)
    return first if first > PATIENCE_SECONDS else min(first, timed_step(run), timed_step(run))


def run_on_random_tokens(recipe: Recipe, options: RunOptions, tokens_per_step: int) -> TrainingRun:
    vocab_size = recipe.shape.vocab_size
    draws = np.random.default_rng(0)
    tokens = draws.integers(1, min(vocab_size, 2**16), 4 * tokens_per_step + 1).astype(np.uint16)
    stream = PackedStream(tokens, end_token=0)
    return TrainingRun(from_scratch(recipe, tokens_per_step), options, made_up_tokenizer(vocab_size), stream)


def made_up_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Its tokens are numbers, the first of which is end-of-text."""
    words = models.WordLevel({str(number): number for number in range(vocab_size)}, unk_token=FIRST)
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), eos_token=FIRST)


def timed_step(run: TrainingRun) -> float:
    started = time.perf_counter()
    run.train_step(run.batches_of(run.step))
    return time.perf_counter() - started


def from_scratch(recipe: Recipe, tokens_per_step: int) -> Recipe:
    """The recipe with steps of this size, and without an initial model."""
    return replace(
        recipe,
        method="nvium" if recipe.method == "retrofit" else recipe.method,
        initial=None,
        tokenizer="any",
        text="documents",
        tokens_per_step=tokens_per_step,
        total_tokens=100 * tokens_per_step,
        long_context_share=0.0,
        beta=BetaSettings(initial=recipe.beta.initial),
    )


def table(estimate: Estimate) -> Table:
    """For the terminal."""
    shown = Table("a run of this recipe", "takes")
    for section in (what_is_trained(estimate), what_is_held(estimate), what_is_done(estimate)):
        for name, value in section.items():
            shown.add_row(name, value)
        shown.add_section()
    return shown


def what_is_trained(estimate: Estimate) -> dict[str, str]:
    recipe, each, shape = estimate.recipe, estimate.each, estimate.recipe.shape
    exits = ", ".join(map(str, shape.exit_depths))
    return {
        "parameters": f"{num_parameters(recipe):,}: {shape.num_layers} layers × {shape.width}, exits after {exits}",
        "text": f"{quantity(recipe.total_tokens)} tokens in {recipe.num_steps:,} steps of {recipe.tokens_per_step:,}",
        "a pass": f"{each.rows:,} rows in windows of {each.context:,}, {str(each.dtype).removeprefix('torch.')}",
    }


def what_is_held(estimate: Estimate) -> dict[str, str]:
    recipe, each, memory = estimate.recipe, estimate.each, estimate.memory
    sparing = footprint(recipe, replace(each, checkpointing=True))
    heads = (held_head_bytes(recipe.shape, each), chunked_head_bytes(recipe.shape, each))
    fits = "of" if memory.total < estimate.available_bytes else "does not fit into the"
    return {
        "weights, gradients": f"{quantity(memory.weights)}B, {quantity(memory.gradients)}B",
        "optimiser": f"{quantity(memory.optimizer)}B",
        "activations": f"{quantity(memory.activations)}B; with checkpointing {quantity(sparing.activations)}B",
        "head": f"{quantity(memory.head)}B; all logits held {quantity(heads[0])}B, in chunks {quantity(heads[1])}B",
        "memory in all": f"{quantity(memory.total)}B {fits} {quantity(estimate.available_bytes)}B that are free",
        "disk": f"{quantity(checkpoint_bytes(recipe))}B a checkpoint, two kept and a third while it is written; "
        f"{quantity(model_bytes(recipe))}B the model",
    }


def what_is_done(estimate: Estimate) -> dict[str, str]:
    recipe = estimate.recipe
    per_token = token_flops(recipe, recipe.short_context)
    done = {"compute": f"{quantity(estimate.flops)}FLOP, {quantity(per_token)}FLOP a token"}
    if estimate.speed is None or estimate.seconds is None:
        return done | {"time": "unknown, as it does not fit; --flops-per-second tells a device's rate"}
    rate = quantity(estimate.speed.flops_per_second)
    tokens_per_second = recipe.total_tokens / estimate.seconds
    return done | {"time": f"{spoken_time(estimate.seconds)} at {rate}FLOP/s, {tokens_per_second:,.0f} tokens/s"}


def quantity(number: float) -> str:
    """Three digits and a decimal prefix."""
    power = 0
    while number >= 999.5 and power < len(UNITS) - 1:
        number, power = number / 1000, power + 1
    return f"{number:.3g} {UNITS[power]}"


def spoken_time(seconds: float) -> str:
    minutes = round(seconds / 60)
    if minutes < 1:
        return f"{seconds:.0f} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"
