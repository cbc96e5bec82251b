"""Measure training tokens per second, and FLOPs as a share of the device's peak.

    python -m research.training_speed --recipe paper-24x768 --device cuda

Tokens are random, and no model is written.
"""

import argparse
import json
from pathlib import Path
from statistics import median

from nvium_core.bench.harness import Figures
from nvium_core.bench.machine import ENOUGH_SECONDS, arithmetic_rate
from nvium_core.training.dry_run import run_on_random_tokens, timed_step, token_flops
from nvium_core.training.options import RunOptions
from nvium_core.training.recipes.catalogue import recipe_named


def measure(recipe_name: str, options: RunOptions, num_steps: int) -> Figures:
    """Time training steps of one forward and backward pass each. The first step, which compiles, has its own field."""
    recipe = recipe_named(recipe_name, [])
    run = run_on_random_tokens(recipe, options, options.rows_per_pass)
    first = timed_step(run)
    seconds = median(timed_step(run) for _ in range(num_steps))
    flops = token_flops(run.recipe, recipe.short_context, options.checkpoint_activations)
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
    figures = json.dumps(measure(args.recipe, options, args.steps), indent=1)
    if args.json:
        args.json.write_text(figures + "\n", encoding="utf-8")
    print(figures)


if __name__ == "__main__":
    main()
