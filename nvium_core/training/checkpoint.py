"""A run's checkpoint, `state.pt`: weights, optimisers, β and the step, unsharded.

Written by the first process, read by all. It replaces the last one, which is kept as `state.previous.pt`.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.optim import Optimizer

from nvium_core.training.distributed import Processes
from nvium_core.training.errors import TrainingError

State = dict[str, Any]

STATE, PREVIOUS, PARTIAL = "state.pt", "state.previous.pt", "state.partial"
PARTS = {"model", "optimizers", "beta", "step", "recipe"}
FORMAT = 2
"""Version of the file's content; files without one have version 1. Raise it whenever a recipe's settings change."""


def gathered(model: nn.Module, optimizers: Sequence[Optimizer]) -> State:
    """All weights and optimiser states by parameter name, on the CPU. Every process must call it; the first gets
    them."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights, moments = get_state_dict(model, list(optimizers), options=options)
    return {"model": weights, "optimizers": moments}


def gathered_weights(model: nn.Module) -> dict[str, Any]:
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


def scatter(state: State, model: nn.Module, optimizers: Sequence[Optimizer], processes: Processes) -> None:
    """Load every process's part of what `gathered` returned."""
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=processes.count > 1)
    set_state_dict(
        model,
        list(optimizers),
        model_state_dict=state["model"],
        optim_state_dict=state["optimizers"],
        options=options,
    )


def write_state(state: State, folder: Path) -> None:
    """Write `state.pt` atomically and keep the previous one."""
    partial = folder / PARTIAL
    try:
        with partial.open("wb") as file:
            torch.save(state | {"format": FORMAT}, file)
            file.flush()
            os.fsync(file.fileno())
        if (folder / STATE).exists():
            (folder / STATE).replace(folder / PREVIOUS)
        partial.replace(folder / STATE)
    except (OSError, RuntimeError) as error:
        if partial.is_file():
            partial.unlink()
        raise TrainingError(f"{partial}: cannot write the checkpoint ({error}); the last one is intact") from error


def read_state(folder: Path) -> State | None:
    """The last checkpoint, or None. Raises `TrainingError` for another version's, and for a damaged one."""
    path = folder / STATE
    if not path.exists():  # nor would it, for a moment, while a new one takes the place of the last
        path = folder / PREVIOUS
    if not path.exists():
        return None
    try:
        state = loaded(path)
    except TrainingError as error:
        raise TrainingError(
            f"{error}; delete it to begin again, or move {folder / PREVIOUS} there if it exists"
        ) from error
    if (found := state.get("format", 1)) != FORMAT:
        raise TrainingError(f"{path}: format {found} is another version's of nvium; this one reads {FORMAT}")
    return state


def loaded(path: Path) -> State:
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever torch makes of a file that is none of its own
        raise TrainingError(f"{path}: damaged ({error!r})") from error
    if not (isinstance(state, dict) and state.keys() >= PARTS):
        raise TrainingError(f"{path}: damaged (not a checkpoint of a run)")
    return state
