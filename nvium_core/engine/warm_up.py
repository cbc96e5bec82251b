"""Measures the schedules at start-up by generating tokens. The results are cached on disk."""

import hashlib
import json
import os
import platform
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import torch
from platformdirs import user_cache_path

from nvium_core.engine.engine import Engine
from nvium_core.engine.params import SamplingParams, require

SIZES = 1, 2
"""Numbers of sequences to measure at start-up. Larger numbers are measured while serving."""

SECONDS = 1.0
PROMPT_TOKENS, MAX_TOKENS = 8, 512

VERSION = 2  # format of the race files, part of their name


def warm_up(engine: Engine, *, remembers: bool = False) -> None:
    """Prepare the device, and measure the schedules for about a second. The engine must be idle.

    With `remembers`, save the measurements, and reuse those of the same model, options and machine.
    """
    require(not engine.has_work, "engine", "must be idle for the warm-up")
    engine.runner.prepare()
    room = min(engine.context, engine.pool.num_pages * engine.pool.page_size) - 1
    engine.generate([[0]], SamplingParams(max_tokens=min(4, room), seed=0, ignore_eos=True))
    race = engine.scheduler.schedules
    if not race.is_open:
        return
    file = race_file(engine) if remembers else None
    if file:
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):  # the file may be missing or damaged
            race.remember(json.loads(file.read_text(encoding="utf-8")))
    sizes = [size for size in SIZES if size <= engine.scheduler.bounds.sequences and not race.is_decided(size)]
    until = time.monotonic() + SECONDS
    for size in sizes:
        generate(engine, size, until)
    if file and sizes:
        with suppress(OSError):  # the folder may not be writable
            file.parent.mkdir(parents=True, exist_ok=True)
            scratch = file.with_suffix(f".{os.getpid()}")
            scratch.write_text(json.dumps(race.as_dict()), encoding="utf-8")
            scratch.replace(file)


def generate(engine: Engine, num_sequences: int, until: float) -> None:
    """Generate tokens until the race is decided, but not after the time `until`."""
    race = engine.scheduler.schedules
    room = min(engine.context, engine.pool.num_pages * engine.pool.page_size // num_sequences)
    max_tokens = min(MAX_TOKENS, room - PROMPT_TOKENS)
    while max_tokens > 0 and time.monotonic() < until and not race.is_decided(num_sequences):
        for number in range(num_sequences):
            prompt = [(number + t) % engine.limits.vocab_size for t in range(PROMPT_TOKENS)]
            params = SamplingParams(max_tokens=max_tokens, seed=number, sampling="exits", ignore_eos=True)
            engine.add(f"warm-up-{number}", prompt, params, cache_salt="warm-up")
        while engine.has_work and time.monotonic() < until and not race.is_decided(num_sequences):
            engine.step()
        for number in range(num_sequences):
            engine.cancel(f"warm-up-{number}")


def race_file(engine: Engine) -> Path:
    """Return the file of measurements. Its name is a digest of all that affects speed, except the machine's load."""
    model = engine.runner.model
    shape = {
        name: value for name, value in model.config.to_dict().items() if isinstance(value, int | float | str | list)
    }
    conditions = {
        "version": VERSION,
        "shape": shape,
        "dtype": str(model.dtype),
        "device": torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else platform.machine(),
        "instructions": [torch.backends.cpu.get_cpu_capability(), engine.runner.processor],
        "torch": torch.__version__,
        "engine": {name: value for name, value in asdict(engine.config).items() if isinstance(value, int | str | None)},
    }
    name = hashlib.sha256(json.dumps(conditions, sort_keys=True, default=str).encode()).hexdigest()
    return (engine.config.calibrations or user_cache_path("nvium") / "calibration") / f"race-{name[:32]}.json"
