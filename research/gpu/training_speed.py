"""Measure training tokens per second, and FLOPs as a share of the device's peak.

    python -m research.gpu.training_speed --recipe paper-24x768 --device cuda

Tokens are random, and no model is written.
"""

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from nvium_core.bench.figures import ENOUGH_SECONDS, Figures, arithmetic_rate, write_json
from nvium_core.model.flops import flops_per_token
from nvium_core.options import RunOptions
from nvium_core.training.data.windows import PackedStream
from nvium_core.training.optimizer import BetaSettings
from nvium_core.training.recipes.catalogue import recipe_named
from nvium_core.training.recipes.recipe import Recipe
from nvium_core.training.train import TrainingRun


def run_on_random_tokens(recipe: Recipe, options: RunOptions, tokens_per_step: int) -> TrainingRun:
    """Return a run with this step size, random initial weights and a random text."""
    vocab_size, end = recipe.shape.vocab_size, "0"
    tokens = np.random.default_rng(0).integers(1, vocab_size, 4 * tokens_per_step + 1)
    words = models.WordLevel({str(token): token for token in range(vocab_size)}, unk_token=end)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), eos_token=end)
    beta = BetaSettings(initial=recipe.beta.initial)
    total = 100 * tokens_per_step
    sized = replace(recipe, tokens_per_step=tokens_per_step, total_tokens=total, beta=beta, initial=None)
    return TrainingRun(sized, options, tokenizer, PackedStream(tokens.astype(np.uint16), 0, recipe.shape.context))


def timed_step(run: TrainingRun) -> float:
    started = time.perf_counter()
    run.train_step(run.batches_of(run.step))
    return time.perf_counter() - started


def measure(recipe_name: str, options: RunOptions, num_steps: int) -> Figures:
    """Time training steps of one forward and backward pass each. The first step, which compiles, has its own field."""
    recipe = recipe_named(recipe_name, [])
    run = run_on_random_tokens(recipe, options, options.rows_per_pass)
    first = timed_step(run)
    seconds = median(timed_step(run) for _ in range(num_steps))
    shape = recipe.shape
    flops = 3 * flops_per_token(shape.config(shape.vocab_size, end_token=0), shape.context)
    rate, peak = options.rows_per_pass / seconds, arithmetic_rate(run.autocast_dtype, run.device, ENOUGH_SECONDS)
    return {
        "experiment": "training",
        "recipe": recipe_name,
        "device": options.device,
        "dtype": str(run.autocast_dtype).removeprefix("torch."),
        "is_compiled": options.compile,
        "tokens_per_step": options.rows_per_pass,
        "steps": num_steps,
        "first_step_seconds": first,
        "step_seconds": seconds,
        "tokens_per_second": rate,
        "flops_per_token": flops,
        "peak_flops_per_second": peak,
        "share_of_peak": rate * flops / peak,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", default="paper-24x768")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rows", type=int, default=RunOptions.rows_per_pass, help="tokens per step")
    parser.add_argument("--eager", action="store_true", help="do not compile")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    options = RunOptions(
        data=Path(), folder=Path(), device=args.device, compile=not args.eager, rows_per_pass=args.rows
    )
    figures = measure(args.recipe, options, args.steps)
    if args.json:
        write_json(figures, args.json)
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
