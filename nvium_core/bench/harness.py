"""Shared parts of the experiments: the model to measure, timed runs, and interleaved turns.

Contenders take turns, so that a slow phase of the machine affects all of them. Each turn gives a ratio of two speeds;
a speed-up is the median of these ratios. Every ratio is reported with its quartiles and its number of turns.
"""

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import TypeVar

import torch
from rich.console import Console
from rich.progress import track

from nvium_core.bench.contenders.contender import Generation
from nvium_core.bench.figures import Figures
from nvium_core.bench.shapes import PAPER_ROUTING, force_routing, random_weights, shape_config
from nvium_core.choices import Device, Precision, Weights
from nvium_core.engine.config import MAX_SEQUENCES
from nvium_core.engine.device import processor
from nvium_core.engine.engine import Engine
from nvium_core.engine.errors import InvalidRequest, require
from nvium_core.engine.events import Completion
from nvium_core.engine.sampling_params import SamplingParams
from nvium_core.loading import LoadedModel, load_model, resolve_device, resolve_dtype
from nvium_core.model.config import MAX_SIZES
from nvium_core.model.nvium import Nvium
from nvium_core.model.source import is_gguf
from nvium_core.model.stored import quantize_model
from nvium_core.training.caveats import caveats

PROMPT = "Once upon a time there was a"
MIN_TURNS = 3  # turns of a ratio that may be a headline
PROMPT_TOKENS = 8  # prompt length for a model without a tokenizer

Request = tuple[list[int], SamplingParams]

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Subject:
    """The model to measure, with a short prompt. `file`: the GGUF file that the model was loaded from, if any."""

    name: str
    model: Nvium
    prompt: list[int]
    weights: Weights = "auto"
    file: Path | None = None

    @property
    def context(self) -> int:
        return self.model.config.max_position_embeddings

    def as_dict(self) -> Figures:
        trained = {
            "model": self.name,
            "training_tokens": self.model.config.training_tokens,
            "num_parameters": self.model.num_parameters(),
        }
        return {
            **trained,
            "caveats": caveats(trained),
            "num_exits": self.model.config.num_exits,
            "device": str(self.model.device),
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "weights": self.weights,
            "instructions": processor.instructions() if self.model.device.type == "cpu" else None,
            "threads": torch.get_num_threads(),
        }


def load_subject(
    model: str | None,
    shape: str | None,
    routing: str | None,
    loops: int | None,
    device: Device,
    dtype: Precision,
    weights: Weights = "auto",
    exits: str | None = None,
) -> Subject:
    """Load `model`, or build random weights of `shape`. Raise `InvalidRequest` for contradictory options."""
    for name, given in (("routing", routing), ("loops", loops)):
        require(given is None or shape is not None, name, "requires shape, because it sets random weights")
    require(loops is None or 1 <= loops <= MAX_SIZES["num_loops"], "loops", f"must be at least 1, got {loops}")
    if shape is None:
        return subject_of(load_model(model, device, dtype, weights=weights, exits=exits), weights)
    require(model is None and exits is None, "shape", "cannot be combined with model or exits")
    shares = numbers(routing, "routing") if routing else PAPER_ROUTING
    config, place = shape_config(shape, len(shares), num_loops=loops or 1), resolve_device(device)
    random_model = random_weights(config, dtype=resolve_dtype(dtype, place), device=place)
    force_routing(random_model, shares)
    quantize_model(random_model, weights)
    return Subject(f"random-{shape}", random_model, list(range(1, PROMPT_TOKENS + 1)), weights)


def subject_of(loaded: LoadedModel, weights: Weights = "auto") -> Subject:
    file = loaded.folder if loaded.folder and is_gguf(loaded.folder) else None
    return Subject(loaded.name, loaded.model, loaded.tokenizer(PROMPT).input_ids, weights, file)


def timed(engine: Engine, requests: Sequence[Request]) -> Generation:
    """Run all requests to completion. Raise `EngineError` if a request fails.

    The engine must be idle, and each request must have one choice.
    """
    started = time.perf_counter()
    first_seconds: dict[str, float] = {}
    completions = {str(number): Completion() for number in range(len(requests))}
    for number, (prompt, params) in enumerate(requests):
        engine.add(str(number), prompt, params)
    for event in engine.run():
        completions[event.request_id].append(event)
        first_seconds.setdefault(event.request_id, time.perf_counter() - started)
    return Generation(
        seconds=time.perf_counter() - started,
        first_token_seconds=[first_seconds[name] for name in completions],
        token_ids=[completion.token_ids for completion in completions.values()],
        exits=[completion.exits for completion in completions.values()],
    )


def interleaved(
    contenders: Mapping[str, Callable[[int], Result]], repeats: int, label: str, seconds: float = math.inf
) -> dict[str, list[Result]]:
    """Run a warm-up turn and then `repeats` turns of each contender. Return the results, without the warm-up's.

    In every second turn the contenders run in reverse order. All contenders get an equal share of `seconds`. Each
    contender runs at least one turn after the warm-up, and stops when its next turn would exceed its share.
    """
    results: dict[str, list[Result]] = {name: [] for name in contenders}
    spent, allowed = dict.fromkeys(contenders, 0.0), seconds / len(contenders)
    for number in track(range(repeats + 1), label, transient=True, console=Console(stderr=True)):
        if not sys.stderr.isatty():
            sys.stderr.write(f"{label}: turn {number} of {repeats}\n")
        for name, contender in list(contenders.items())[:: -1 if number % 2 else 1]:
            num_turns = len(results[name]) + 1
            if number < 2 or spent[name] * (1 + 1 / num_turns) <= allowed:
                started = time.perf_counter()
                result = contender(number)
                spent[name] += time.perf_counter() - started
                results[name] += [result] if number else []
    return results


def ratio(name: str, values: Sequence[float], baselines: Sequence[float]) -> Figures:
    """Return the median over the turns of value / baseline as `name`, with its quartiles and number of turns."""
    ratios = [value / baseline for value, baseline in zip(values, baselines, strict=False)]
    low, _, high = quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    return {name: median(ratios), f"{name}_quartiles": [low, high], f"{name}_turns": len(ratios)}


def spread(name: str, seen: Figures) -> str:
    """Format a `ratio` with its quartiles and turns."""
    low, high = seen[f"{name}_quartiles"]
    num_turns = seen[f"{name}_turns"]
    if num_turns < MIN_TURNS:
        return f"{seen[name]:.2f} ({num_turns} of {MIN_TURNS} turns: too few)"
    return f"{seen[name]:.2f} ({low:.2f} to {high:.2f}, {num_turns} turns)"


def verdict(name: str, seen: Figures) -> str:
    """Return a `ratio` in words. Without enough turns, or if half of them disagree about the faster one, say so."""
    low, high = seen[f"{name}_quartiles"]
    if seen[f"{name}_turns"] < MIN_TURNS:
        return f"too few turns ({seen[f'{name}_turns']} of {MIN_TURNS})"
    if low <= 1 <= high:
        return f"no difference seen ({low:.2f} to {high:.2f})"
    return f"{seen[name]:.2f} times as fast ({low:.2f} to {high:.2f})"


def conclusion(num_exits: int, name: str, gains: Mapping[int, Figures]) -> str:
    """Return a sentence with the speed-ups over full depth. `gains`: number of streams → figures with a `ratio`."""
    if num_exits == 1:
        return "The model has no early exits."
    parts = [f"{count(number, 'stream')} {verdict(name, gain)}" for number, gain in gains.items()]
    return f"Early exits compared with full depth: {', '.join(parts)}."


def count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def numbers(text: str, option: str) -> tuple[float, ...]:
    """Parse numbers separated by commas."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise InvalidRequest(option, f"must be numbers separated by commas, got {text!r}") from None


def counts(text: str, option: str) -> tuple[int, ...]:
    """Parse integers in [1, `MAX_SEQUENCES`] separated by commas."""
    values = numbers(text, option)
    are_counts = all(1 <= value <= MAX_SEQUENCES and value.is_integer() for value in values)
    require(are_counts, option, f"must be integers from 1 to {MAX_SEQUENCES}, got {text!r}")
    return tuple(map(int, values))


def shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
