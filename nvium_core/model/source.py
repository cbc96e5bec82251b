"""Reads a checkpoint from a folder, a Hub name or a GGUF file, optionally with exits from a separate folder.

Retrofitted exits are stored separately from their base model as `exits.safetensors` and `exits.json`. Base and exits
together are an N-vium. Its last exit computes exactly what the base computes, because the last exit's adapter is zero.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import save_file
from torch import Tensor

from nvium_core.errors import CheckpointError, one_line
from nvium_core.model.checkpoint import (
    EXITS_WEIGHTS,
    Checkpoint,
    parse_file,
    read_checkpoint,
    read_safetensors,
    resolve_folder,
    stored_matrices,
)
from nvium_core.model.config import NviumConfig
from nvium_core.model.gguf import read_gguf
from nvium_core.model.gguf_header import MAGIC, OLD_MAGICS
from nvium_core.model.stored import dequantize

ABOUT = "exits.json"
SHAPE = ("num_hidden_layers", "hidden_size", "vocab_size")
"""Fields of the base that are compared first. An error about a field is clearer than one about the digest."""

EXIT_FIELDS = ("exit_layers", "router_hidden_size", "adapter_hidden_size", "router_temperature")
DIGEST_VALUES = 4096
"""Number of values of each tensor in the digest. Hashing all values would read a large base twice."""


def is_gguf(source: object) -> bool:
    """Return whether `source` is a file with GGUF's suffix, even before another one, or its magic number.

    Ollama's GGUF files have no suffix. Containers older than GGUF count too, so that their error names them.
    """
    path = Path(str(source))
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return ".gguf" in path.name.lower() or file.read(len(MAGIC)) in (MAGIC, *OLD_MAGICS)


def read_source(
    source: str | PathLike[str],
    config: NviumConfig | None = None,
    exits: str | PathLike[str] | None = None,
    **hub_options: Any,
) -> Checkpoint:
    """Read a checkpoint. Raise `CheckpointError` if it cannot be loaded.

    config: replaces the configuration in the source.
    exits: folder or Hub name of retrofitted exits for this model.
    hub_options: passed to the Hub client.
    """
    is_file = is_gguf(source)
    checkpoint = read_gguf(Path(source), config) if is_file else read_checkpoint(source, config, **hub_options)
    return checkpoint if exits is None else with_exits_of(checkpoint, exits, **hub_options)


def digest_of(tensors: Mapping[str, Tensor], config: NviumConfig) -> str:
    """Return the SHA-256 of names, shapes and first values of the tensors. Values are rounded to bfloat16."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        width = tensors[name].shape[1:].numel()
        rows = dequantize(tensors[name].detach()[: -(-DIGEST_VALUES // width)])  # a file's other pages are not read
        values = rows.flatten()[:DIGEST_VALUES].to(torch.bfloat16).contiguous()
        digest.update(f"{name} {list(tensors[name].shape)}".encode())
        digest.update(values.view(torch.int16).cpu().numpy().tobytes())
    return digest.hexdigest()


def describe_exits(config: NviumConfig, base: str, digest: str, **more: Any) -> dict[str, Any]:
    """Return the content of exits.json. `config` is the configuration of the base with the exits."""
    shape = {name: getattr(config, name) for name in SHAPE}
    exits = {name: getattr(config, name) for name in EXIT_FIELDS}
    return {"nvium_format": config.nvium_format, **exits, "base": {"name": base, **shape, "digest": digest}, **more}


def write_exits(tensors: Mapping[str, Tensor], about: Mapping[str, Any], folder: Path) -> None:
    """Write exits.safetensors and exits.json. Each file is replaced atomically."""
    partial = folder / "partial"
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, partial, metadata={"format": "pt"})
    partial.chmod(0o644)  # safetensors may make files readable by the owner only
    partial.replace(folder / EXITS_WEIGHTS)
    partial.write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    partial.replace(folder / ABOUT)


def with_exits_of(base: Checkpoint, source: str | PathLike[str], **hub_options: Any) -> Checkpoint:
    """Add the exits of a folder or Hub name to a base. Raise `CheckpointError` if the exits belong to another base."""
    try:
        folder = resolve_folder(source, **hub_options)
    except CheckpointError as error:
        raise CheckpointError(f"exits: {error}") from error
    about = parse_file(folder / ABOUT, json.loads)
    if not isinstance(about, dict) or not isinstance(about.get("base"), dict):
        raise CheckpointError(f"{folder / ABOUT}: must be a JSON object with the object `base`")
    check_base(base, about, folder)
    try:
        fields = {name: about[name] for name in (*EXIT_FIELDS, "nvium_format")} | {"default_sampling": "original"}
        config = NviumConfig.from_dict(base.config.to_dict() | fields)
    except (KeyError, TypeError, ValueError, StrictDataclassError) as error:
        raise CheckpointError(f"{folder / ABOUT}: {one_line(error.__cause__ or error)}") from error
    last = f"exits.{config.num_exits - 1}"
    path, width, inner = folder / EXITS_WEIGHTS, config.hidden_size, config.adapter_hidden_size or 0
    added = stored_matrices(folder, read_safetensors(path))
    if others := [name for name in added if not name.startswith("exits.")]:
        raise CheckpointError(f"{path}: unexpected tensor {others[0]}; all names must begin with `exits.`")
    adapter = added.get("exits.0.adapter.up.weight")
    if inner and (adapter is None or list(adapter.shape) != [inner, width]):  # before allocating that many zeros
        raise CheckpointError(f"{folder / ABOUT}: adapter_hidden_size is {inner}, but {EXITS_WEIGHTS} has another")
    tensors = dict(base.tensors)
    norm = tensors.pop("exits.0.norm.weight")  # the base's only norm becomes that of the last exit
    return replace(
        base,
        config=config,
        exits_folder=folder,
        tensors=tensors
        | added
        | {
            f"{last}.norm.weight": norm,
            f"{last}.adapter.up.weight": norm.new_zeros(inner, width),
            f"{last}.adapter.down.weight": norm.new_zeros(width, inner),
        },
    )


def check_base(base: Checkpoint, about: dict[str, Any], folder: Path) -> None:
    """Raise `CheckpointError` unless the exits were made for this base."""
    made_for = f"{folder}: these exits were made for {about['base'].get('name')}"
    if base.config.num_loops > 1:
        raise CheckpointError(f"{made_for}, but {base.folder} is a looped model, which cannot be retrofitted")
    if base.config.num_exits > 1 or base.config.adapter_hidden_size:
        raise CheckpointError(f"{made_for}, but {base.folder} already has exits")
    for name in SHAPE:
        expected, found = about["base"].get(name), getattr(base.config, name)
        if expected != found:
            raise CheckpointError(f"{made_for} with {name} {expected}, but {base.folder} has {found}")
    if about["base"].get("digest") != digest_of(base.tensors, base.config):
        raise CheckpointError(f"{made_for}, but {base.folder} has different weights (the digests differ)")
