"""A run's folder: its lock, tokenizer, model, and checkpoint `state.pt` with weights, optimisers, β and recipe."""

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.optim import Optimizer
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import GENERATION_CONFIG_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import CHAT_TEMPLATE_FILE
from transformers.utils.logging import disable_progress_bar

from nvium_core.errors import TrainingError

State = dict[str, Any]

STATE = "state.pt"
PARTS = {"model", "optimizers", "beta", "step", "recipe"}
FORMAT = 8
"""Version of the checkpoint format, 1 for files without a version. Increment it if `Recipe` or an optimiser changes."""


@contextmanager
def owned(folder: Path) -> Iterator[None]:
    """Create and lock the folder. Raise `TrainingError` if it cannot be created or another run has locked it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / "lock").acquire(blocking=False)
    except Timeout as error:
        raise TrainingError(f"{folder}: another run is using it") from error
    except OSError as error:
        raise TrainingError(f"{folder}: cannot write to the folder ({error})") from error
    with lock:
        yield


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write tokenizer.json, and tokenizer_config.json with the chat template. Any `AutoTokenizer` can load them."""
    tokenizer.save_pretrained(folder)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokenizer.bos_token,
        "eos_token": tokenizer.eos_token,
        "model_max_length": tokenizer.model_max_length,
        "clean_up_tokenization_spaces": False,
    }
    if tokenizer.chat_template:
        config["chat_template"] = tokenizer.chat_template
        (folder / CHAT_TEMPLATE_FILE).unlink(missing_ok=True)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def write_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write the model and its tokenizer as a Hugging Face folder, atomically. Replace an earlier folder."""
    partial = folder.with_name("model.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        disable_progress_bar()
        model.save_pretrained(partial)
        if model.generation_config.eos_token_id == model.config.eos_token_id:  # generation_config.json adds nothing
            (partial / GENERATION_CONFIG_NAME).unlink(missing_ok=True)
        save_tokenizer(tokenizer, partial)
        (partial / SAFE_WEIGHTS_NAME).chmod(0o644)  # transformers writes a file that only the owner can read
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    except (OSError, SafetensorError) as error:
        raise TrainingError(f"{partial}: cannot write the model ({error}); the checkpoint is intact") from error


def restore(state: State, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    is_whole = all(parameter.requires_grad for parameter in model.parameters())
    set_state_dict(
        model,
        list(optimizers),
        model_state_dict=state["model"],
        optim_state_dict=state["optimizers"],
        options=StateDictOptions(strict=is_whole),
    )


def write_state(model: nn.Module, optimizers: Sequence[Optimizer], own: State, folder: Path) -> None:
    """Write the trainable weights and the optimisers' states, by parameter name, and `own`, atomically."""
    options = StateDictOptions(cpu_offload=True, ignore_frozen_params=True)
    weights, moments = get_state_dict(model, list(optimizers), options=options)
    state, partial = {"model": weights, "optimizers": moments, "format": FORMAT, **own}, folder / "state.partial"
    try:
        with partial.open("wb") as file:
            torch.save(state, file)
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
