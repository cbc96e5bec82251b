"""A run's checkpoint, `state.pt`: weights, optimiser states, β, step and recipe.

The first process writes the whole file and all processes read it. The previous checkpoint is kept as
`state.previous.pt`.
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
FORMAT = 5
"""Version of the checkpoint format, 1 for files without a version. Increment it if `Recipe` or an optimiser changes."""

WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)


def gather(model: nn.Module, optimizers: Sequence[Optimizer]) -> State:
    """Gather the trainable weights and optimiser states on the CPU of the first process.

    Every process must call this.
    """
    weights, moments = get_state_dict(model, list(optimizers), options=WHOLE)
    return {"model": weights, "optimizers": moments}


def gather_weights(model: nn.Module) -> dict[str, Any]:
    """Gather the weights by parameter name on the CPU of the first process. Every process must call this."""
    return get_model_state_dict(model, options=WHOLE)


def scatter(state: State, model: nn.Module, optimizers: Sequence[Optimizer], processes: Processes) -> None:
    """Load a gathered state. Each process loads its own shard."""
    is_whole = all(parameter.requires_grad for parameter in model.parameters())
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=processes.count > 1, strict=is_whole)
    set_state_dict(
        model,
        list(optimizers),
        model_state_dict=state["model"],
        optim_state_dict=state["optimizers"],
        options=options,
    )


def write_state(state: State, folder: Path) -> None:
    """Write `state.pt` atomically and keep the previous checkpoint."""
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
        raise TrainingError(
            f"{partial}: cannot write the checkpoint ({error}); the previous checkpoint is intact"
        ) from error


def read_state(folder: Path) -> State | None:
    """Return the last checkpoint, or None. Raise `TrainingError` if the file is damaged or has another format."""
    path = folder / STATE
    if not path.exists():  # a run was killed between the two renames in `write_state`
        path = folder / PREVIOUS
    if not path.exists():
        return None
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        if not (isinstance(state, dict) and state.keys() >= PARTS):
            raise ValueError("not a checkpoint of a run")
    except Exception as error:  # torch.load raises many types of exceptions for damaged files
        raise TrainingError(
            f"{path}: damaged ({error!r}); delete it to start over, or replace it with {folder / PREVIOUS}"
        ) from error
    if (found := state.get("format", 1)) != FORMAT:
        raise TrainingError(f"{path}: has format {found}, but this version of nvium reads format {FORMAT}")
    return state
