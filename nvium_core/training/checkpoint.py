"""A run's checkpoint, `state.pt`: weights, optimiser states, β, step and recipe."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.optim import Optimizer

from nvium_core.training.errors import TrainingError

State = dict[str, Any]

STATE, PARTIAL = "state.pt", "state.partial"
PARTS = {"model", "optimizers", "beta", "step", "recipe"}
FORMAT = 8
"""Version of the checkpoint format, 1 for files without a version. Increment it if `Recipe` or an optimiser changes."""


def state_of(model: nn.Module, optimizers: Sequence[Optimizer]) -> State:
    """Return the trainable weights and the optimisers' states, by parameter name, on the CPU."""
    options = StateDictOptions(cpu_offload=True, ignore_frozen_params=True)
    weights, moments = get_state_dict(model, list(optimizers), options=options)
    return {"model": weights, "optimizers": moments}


def restore(state: State, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    is_whole = all(parameter.requires_grad for parameter in model.parameters())
    set_state_dict(
        model,
        list(optimizers),
        model_state_dict=state["model"],
        optim_state_dict=state["optimizers"],
        options=StateDictOptions(strict=is_whole),
    )


def write_state(state: State, folder: Path) -> None:
    """Write `state.pt` atomically."""
    partial = folder / PARTIAL
    try:
        with partial.open("wb") as file:
            torch.save(state | {"format": FORMAT}, file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(folder / STATE)
    except (OSError, RuntimeError) as error:
        if partial.is_file():
            partial.unlink()
        raise TrainingError(f"{partial}: cannot write the checkpoint ({error}); the last one is intact") from error


def read_state(folder: Path) -> State | None:
    """Return the last checkpoint, or None. Raise `TrainingError` if the file is damaged or has another format."""
    path = folder / STATE
    if not path.exists():
        return None
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        if not (isinstance(state, dict) and state.keys() >= PARTS):
            raise ValueError("not a checkpoint of a run")
    except Exception as error:  # torch.load raises many types of exceptions for damaged files
        raise TrainingError(f"{path}: damaged ({error!r}); delete it to start over") from error
    if (found := state.get("format", 1)) != FORMAT:
        raise TrainingError(f"{path}: has format {found}, but this version of nvium reads format {FORMAT}")
    return state


def differences(one: dict[str, Any], other: dict[str, Any], prefix: str = "") -> set[str]:
    """Return the dotted keys at which two nested dictionaries differ."""
    keys = set[str]()
    for key in one.keys() | other.keys():
        ours, theirs = one.get(key), other.get(key)
        if isinstance(ours, dict) and isinstance(theirs, dict):
            keys |= differences(ours, theirs, f"{prefix}{key}.")
        elif ours != theirs:
            keys.add(prefix + key)
    return keys
