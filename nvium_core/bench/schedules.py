"""How much the schedules gain: tokens per second of each, measured in turns so that a noisy machine is fair to all."""

import time
from statistics import median
from typing import Any, get_args

import torch
from rich.progress import track

from nvium_core.choices import Schedule
from nvium_core.engine.engine import Engine
from nvium_core.engine.params import EngineConfig, SamplingParams, require
from nvium_core.loading import LoadedModel

PROMPT = "Once upon a time there was a"


def compare(
    loaded: LoadedModel, *, num_sequences: int, num_tokens: int, repeats: int, threads: int | None
) -> dict[str, Any]:
    """Median tokens/s of each schedule, the median of the ratios to `synchronous` of the same turn."""
    require(num_sequences >= 1, "sequences", "must be at least 1")
    require(repeats >= 1, "repeats", "must be at least 1")
    if threads:
        torch.set_num_threads(threads)
    config = {"max_sequences": num_sequences}
    engines = {name: Engine(loaded.model, EngineConfig(schedule=name, **config)) for name in get_args(Schedule)}
    prompts = [loaded.tokenizer(PROMPT).input_ids] * num_sequences
    rates: dict[str, list[float]] = {name: [] for name in engines}
    for turn in track(range(repeats + 1), "measuring", transient=True):
        for name, engine in engines.items():
            rates[name].append(tokens_per_second(engine, prompts, num_tokens, seed=turn))
    measured = {name: turns[1:] for name, turns in rates.items()}  # the first turn warms up
    ratios = {
        f"{name}_over_synchronous": median(a / b for a, b in zip(turns, measured["synchronous"], strict=True))
        for name, turns in measured.items()
        if name != "synchronous"
    }
    return {
        "model": loaded.name,
        "sequences": num_sequences,
        "tokens": num_tokens,
        "threads": torch.get_num_threads(),
        **{f"{name}_tokens_per_second": median(turns) for name, turns in measured.items()},
        **ratios,
    }


def tokens_per_second(engine: Engine, prompts: list[list[int]], num_tokens: int, seed: int) -> float:
    """One run; schedules given the same seed speak the same tokens."""
    params = SamplingParams(max_tokens=num_tokens, seed=seed, ignore_eos=True)
    started = time.perf_counter()
    engine.generate(prompts, params)
    return len(prompts) * num_tokens / (time.perf_counter() - started)
