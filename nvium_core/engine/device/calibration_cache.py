"""What was measured before on this machine, for a model of the same shape run in the same way, kept in a folder."""

import hashlib
import json
import os
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from platformdirs import user_cache_path

from nvium_core.engine.device.native.backend import NativeBackend
from nvium_core.engine.device.native.threads import Threads
from nvium_core.engine.device.runner import Runner
from nvium_core.engine.params import EngineConfig, InvalidRequest
from nvium_core.engine.schedule.costs import StepCosts

VERSION = 3
"""Of what is measured and how: files of another are not read."""


def calibration_file(runner: Runner, config: EngineConfig) -> Path:
    """Named by all that a measurement depends on, but for how busy the machine is."""
    model = runner.model
    shape = {
        name: value for name, value in model.config.to_dict().items() if isinstance(value, int | float | str | list)
    }
    is_cuda = model.device.type == "cuda"
    conditions = {
        "version": VERSION,
        "shape": shape,
        "dtype": str(model.dtype),
        "device": torch.cuda.get_device_name(model.device) if is_cuda else platform.machine(),
        "instructions": [torch.backends.cpu.get_cpu_capability(), runner.processor],
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "backend": type(runner.backend).__name__,
        "engine": {name: value for name, value in asdict(config).items() if isinstance(value, int | str | None)},
    }
    name = hashlib.sha256(json.dumps(conditions, sort_keys=True, default=str).encode()).hexdigest()
    return (config.calibrations or user_cache_path("nvium") / "calibration") / f"{name[:32]}.json"


def read_calibration(file: Path, runner: Runner) -> StepCosts | None:
    """The costs, once the runner goes by its part; None where there is no such file, or a damaged one."""
    try:
        saved: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        costs, max_native_rows = StepCosts.from_dict(saved["costs"]), int(saved["max_native_rows"])
        few, many = (int(number) for number in saved["threads"])
    except (OSError, ValueError, KeyError, TypeError, InvalidRequest):
        return None
    if isinstance(runner.backend, NativeBackend):
        runner.backend.max_native_rows = max_native_rows
        runner.backend.threads.few, runner.backend.threads.many = few, many
    return costs


def write_calibration(file: Path, costs: StepCosts, runner: Runner) -> None:
    """A cache that cannot be written is done without."""
    threads = runner.backend.threads if isinstance(runner.backend, NativeBackend) else Threads.all()
    saved = {
        "costs": costs.as_dict(),
        "max_native_rows": runner.backend.max_native_rows,
        "threads": [threads.few, threads.many],
    }
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        scratch = file.with_suffix(f".{os.getpid()}")
        scratch.write_text(json.dumps(saved), encoding="utf-8")
        scratch.replace(file)
    except OSError:
        return
