"""Reads a configuration and tensors from a folder, a Hub name or a GGUF file, and exits from their own file."""

import re
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from nvium_core.model.checkpoint import Checkpoint, CheckpointError, read_checkpoint
from nvium_core.model.config import NviumConfig
from nvium_core.model.exits_file import with_exits_of

MAGIC = b"GGUF"
PART = re.compile(r"-(\d{5})-of-(?!00000)(\d{5})(\.gguf)$", re.IGNORECASE)


def is_gguf(source: object) -> bool:
    """Whether this is a GGUF file, by suffix or by its first bytes, as Ollama's files have no suffix."""
    path = Path(str(source))
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return path.suffix.lower() == ".gguf" or file.read(len(MAGIC)) == MAGIC


def gguf_parts(path: Path) -> tuple[Path, ...]:
    """The file, or all parts of a split file. Raises `CheckpointError` unless this is the first part and none is
    missing."""
    named = PART.search(path.name)
    if not named:
        return (path,)
    number, count, suffix = int(named[1]), int(named[2]), named[3]
    begin = path.name[: named.start()]
    parts = tuple(path.with_name(f"{begin}-{part:05}-of-{count:05}{suffix}") for part in range(1, count + 1))
    if number != 1:
        raise CheckpointError(
            f"{path}: is part {number} of {count}; name the first, {begin}-00001-of-{count:05}{suffix}"
        )
    if missing := [part.name for part in parts if not part.is_file()]:
        raise CheckpointError(
            f"{path}: is the first of {count} parts; missing from its folder: {', '.join(missing[:5])}"
        )
    return parts


def read_source(
    source: str | PathLike[str],
    config: NviumConfig | None = None,
    dtype: torch.dtype | None = None,
    exits: str | PathLike[str] | None = None,
    **hub_options: Any,
) -> Checkpoint:
    """`dtype`: precision of dequantised groups. `exits`: a folder or Hub name of exits made for this model.

    Raises `CheckpointError` naming what is wrong.
    """
    if is_gguf(source):
        from nvium_core.model.gguf import read_gguf

        checkpoint = read_gguf(Path(source), config, dtype)
    else:
        checkpoint = read_checkpoint(source, config, **hub_options)
    return checkpoint if exits is None else with_exits_of(checkpoint, exits, **hub_options)
