"""What a resumed run must share with the one it continues, because its weights depend on it."""

from dataclasses import MISSING, asdict, fields, replace
from pathlib import Path
from typing import Any

import torch

from nvium_core.training.checkpoint import STATE, State
from nvium_core.training.data.tokens import differences, text_digest
from nvium_core.training.distributed import Processes
from nvium_core.training.errors import TrainingError
from nvium_core.training.options import RunOptions
from nvium_core.training.precision import fast_dtype
from nvium_core.training.recipes.recipe import Recipe
from nvium_core.training.run_folder import EXTENDABLE


def circumstances(options: RunOptions, device: torch.device, processes: Processes) -> dict[str, Any]:
    """What a run's weights depend on besides recipe and text."""
    files = {"validation": options.validation, "dense_log": options.dense_log}
    return {
        **machine(device),
        "processes": processes.count,
        **{name: getattr(options, name) for name in ("sharding", "compile", "rows_per_pass")},
        **{name: path and text_digest(path) for name, path in files.items()},
    }


def machine(device: torch.device) -> dict[str, Any]:
    """Each kind of processor, version of PyTorch and number of threads adds in an order of its own."""
    return {
        "device": device_name(device),
        "precision": str(fast_dtype(device)),
        "threads": torch.get_num_threads() if device.type == "cpu" else None,
        "torch": str(torch.__version__),
    }


def device_name(device: torch.device) -> str:
    """The GPU's, or a CPU's widest instructions."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} {torch.backends.cpu.get_cpu_capability()}"


def check_same(state: State, recipe: Recipe, now: dict[str, Any], options: RunOptions) -> None:
    """Raise `TrainingError`, naming what differs, unless the checkpoint is of this run."""
    path = options.folder / STATE
    others = differences(state["recipe"], asdict(recipe)) - EXTENDABLE
    if others := {name for name in others if not is_new(name, state["recipe"], recipe)}:
        raise TrainingError(f"{path}: holds a run with other {', '.join(sorted(others))}; choose another --folder")
    if not options.accept_changes:
        check_circumstances(state["run"], now, path)


def check_circumstances(recorded: dict[str, Any], now: dict[str, Any], path: Path) -> None:
    """Raise `TrainingError` for others than those recorded."""
    if others := differences(recorded, now):
        begun = ", ".join(f"{name} ({recorded.get(name, 'not recorded')})" for name in sorted(others))
        raise TrainingError(
            f"{path}: holds a run that was begun with other {begun}; resumed, it ends with other weights than an "
            "uninterrupted one: --accept-changes"
        )


def is_new(setting: str, recorded: dict[str, Any], recipe: Recipe) -> bool:
    """Whether a dotted setting came after the checkpoint and has its default, which is what was done before."""
    owner: Any = recipe
    *owners, name = setting.split(".")
    for part in owners:
        owner, recorded = getattr(owner, part, None), recorded[part]
    if owner is None or name in recorded:
        return False
    [field] = [each for each in fields(owner) if each.name == name]
    default = field.default if field.default_factory is MISSING else field.default_factory()
    return bool(getattr(owner, name) == default)


def check_length(total_tokens: int, recipe: Recipe, step: int) -> None:
    """Raise `TrainingError` if another length than the checkpoint's `total_tokens` would have changed the rate, window
    or phase of past steps."""
    begun = replace(recipe, total_tokens=total_tokens)
    if begun.num_steps != recipe.num_steps and due(begun, step) != due(recipe, step):
        raise TrainingError(
            f"total_tokens: step {step} of a run begun with {total_tokens:,} is past the time at which "
            "its length may change; give that number, or choose another --folder"
        )


def due(recipe: Recipe, step: int) -> tuple[float, int, bool]:
    """What a step's place in the run decides: the learning rate's share, the window, and whether routers are
    balanced."""
    progress = step / recipe.num_steps
    return (
        round(recipe.learning_rate.share_at(progress), 9),
        recipe.context_at(progress),
        recipe.router_warmup.active(progress),
    )
