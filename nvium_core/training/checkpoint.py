"""A run's checkpoint, `state.pt`: weights, optimisers, β and the step, unsharded.

Written by the first process, read by all. The file ends in the SHA-256 of its content. It is read back before it
replaces the last one, which is kept as `state.previous.pt`.
"""

import hashlib
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.optim import Optimizer

from nvium_core.training.data.tokens import differences
from nvium_core.training.distributed import Processes
from nvium_core.training.errors import TrainingError

State = dict[str, Any]

STATE, PREVIOUS, PARTIAL = "state.pt", "state.previous.pt", "state.partial"
PARTS = {"model", "optimizers", "beta", "step", "recipe", "run"}
FORMAT = 1
"""Of what is in the file; those that do not say are of the first."""

DIGEST_BYTES = hashlib.sha256().digest_size
MAX_NAMED = 5
"""Differences that an error names."""


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


def check_tensors(state: State, model: nn.Module, optimizers: Sequence[Optimizer], folder: Path) -> None:
    """Raise `TrainingError` unless names and shapes are exactly those of the run's weights and optimisers."""
    weights, moments = get_state_dict(model, list(optimizers))
    expected = shapes({"model": weights, "optimizers": moments})
    if wrong := sorted(differences(shapes({name: state[name] for name in expected}), expected)):
        more = f" and {len(wrong) - MAX_NAMED} more" if len(wrong) > MAX_NAMED else ""
        raise TrainingError(f"{folder / STATE}: other tensors than the run's: {', '.join(wrong[:MAX_NAMED])}{more}")


def shapes(state: State) -> dict[str, Any]:
    """A nested state with tensors replaced by their shapes; numbers and lists of names are left out."""
    parts = {name: shapes(part) if isinstance(part, dict) else part for name, part in state.items()}
    return {
        name: tuple(part.shape) if isinstance(part, Tensor) else part
        for name, part in parts.items()
        if isinstance(part, Tensor | dict)
    }


class Hashed(io.RawIOBase):
    """A write-only file that hashes its content."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._digest = file, hashlib.sha256()

    def write(self, data: Any) -> int:
        self._digest.update(data)
        return self._file.write(data)

    @property
    def digest(self) -> bytes:
        return self._digest.digest()


def write_state(state: State, folder: Path) -> None:
    """Write `state.pt` atomically and keep the previous one."""
    partial = folder / PARTIAL
    try:
        with partial.open("wb") as file:
            hashed = Hashed(file)
            torch.save(state | {"format": FORMAT}, cast(BinaryIO, hashed))
            file.write(hashed.digest)
            file.flush()
            os.fsync(file.fileno())
        if not is_intact(partial):
            raise OSError("what the disk gives back is not what was written")
        if (folder / STATE).exists():
            (folder / STATE).replace(folder / PREVIOUS)
        partial.replace(folder / STATE)
    except (OSError, RuntimeError) as error:
        if partial.is_file():
            partial.unlink()
        raise TrainingError(f"{partial}: cannot write the checkpoint ({error}); the last one is intact") from error


def is_intact(path: Path) -> bool:
    """Whether a file ends in the digest of its content."""
    with path.open("rb") as file:
        remaining = file.seek(0, os.SEEK_END) - DIGEST_BYTES
        file.seek(0)
        digest = hashlib.sha256()
        while remaining > 0 and (part := file.read(min(remaining, 2**20))):
            digest.update(part)
            remaining -= len(part)
        return remaining == 0 and file.read() == digest.digest()


def read_state(folder: Path) -> State | None:
    """The last checkpoint, or None. Raises `TrainingError` for another version's, and for a damaged one, saying whether
    the previous one can be used."""
    path = folder / STATE
    if not path.exists():  # nor would it, for a moment, while a new one takes the place of the last
        path = folder / PREVIOUS
    if not path.exists():
        return None
    try:
        state = loaded(path)
    except TrainingError as error:
        raise TrainingError(f"{error}; {way_out(folder, path)}") from error
    if (found := state.get("format", 1)) != FORMAT:
        raise TrainingError(f"{path}: format {found} is another version's of nvium; this one reads {FORMAT}")
    return state


def way_out(folder: Path, damaged: Path) -> str:
    """What can be done about a damaged checkpoint."""
    previous = folder / PREVIOUS
    try:
        step = loaded(previous)["step"]
    except (TrainingError, OSError):
        return f"there is no other: delete {damaged} to begin again"
    return f"the one before, of step {step}, is intact: `mv {previous} {folder / STATE}` to go on from there"


def loaded(path: Path) -> State:
    try:
        if not is_intact(path):
            raise TrainingError(f"{path}: damaged (its digest is not that of its content)")
        state = torch.load(path, map_location="cpu", weights_only=True)
    except TrainingError:
        raise
    except Exception as error:  # whatever torch makes of a file that is none of its own
        raise TrainingError(f"{path}: damaged ({error!r})") from error
    if not (isinstance(state, dict) and state.keys() >= PARTS):
        raise TrainingError(f"{path}: damaged (not a checkpoint of a run)")
    return state
