"""A run's checkpoint, `state.pt`: weights, optimisers, β and the step reached, whole however they are spread.

Written by the first process, read by it and handed to the others.
"""

import os
import pickle
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

PARTS = {"model", "optimizers", "beta", "step", "recipe"}


def gathered(model: nn.Module, optimizers: Sequence[Optimizer]) -> State:
    """All weights and optimisers by parameter name, on the CPU; every process must ask, the first gets them."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights, moments = get_state_dict(model, list(optimizers), options=options)
    return {"model": weights, "optimizers": moments}


def gathered_weights(model: nn.Module) -> dict[str, Any]:
    """The weights alone."""
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


def scatter(state: State, model: nn.Module, optimizers: Sequence[Optimizer], processes: Processes) -> None:
    """Give every process its part of what `gathered` returned."""
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=processes.count > 1)
    set_state_dict(
        model,
        list(optimizers),
        model_state_dict=state["model"],
        optim_state_dict=state["optimizers"],
        options=options,
    )


def write_state(state: State, folder: Path) -> None:
    """Write `state.pt` whole or not at all."""
    partial = folder / "state.partial"
    try:
        with partial.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(folder / "state.pt")
    except (OSError, RuntimeError) as error:
        if partial.is_file():
            partial.unlink()
        raise TrainingError(f"{partial}: cannot write the checkpoint ({error}); the last one is intact") from error


def read_state(folder: Path) -> State | None:
    """What `state.pt` holds, or None if there is none."""
    path = folder / "state.pt"
    if not path.exists():
        return None
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
        raise TrainingError(f"{path}: damaged ({error!r})") from error
    if not (isinstance(state, dict) and state.keys() >= PARTS):
        raise TrainingError(f"{path}: damaged (not a checkpoint of a run)")
    return state
