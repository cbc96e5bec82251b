"""Reads a checkpoint from a folder, a Hub name or a GGUF file, optionally with exits from a separate folder."""

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
    """Return whether `source` is a file with GGUF's suffix or magic number. Ollama's GGUF files have no suffix."""
    path = Path(str(source))
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return path.suffix.lower() == ".gguf" or file.read(len(MAGIC)) == MAGIC


def gguf_parts(path: Path) -> tuple[Path, ...]:
    """Return the file or, for the first shard of a split model, all shards.

    Raise `CheckpointError` if `path` is another shard, or if shards are missing.
    """
    named = PART.search(path.name)
    if not named:
        return (path,)
    number, count, suffix = int(named[1]), int(named[2]), named[3]
    begin = path.name[: named.start()]
    parts = tuple(path.with_name(f"{begin}-{part:05}-of-{count:05}{suffix}") for part in range(1, count + 1))
    if number != 1:
        raise CheckpointError(f"{path}: is shard {number} of {count}; pass the first shard, {parts[0].name}")
    if missing := [part.name for part in parts if not part.is_file()]:
        raise CheckpointError(f"{path}: is shard 1 of {count}, but the folder lacks {', '.join(missing[:5])}")
    return parts


def read_source(
    source: str | PathLike[str],
    config: NviumConfig | None = None,
    dtype: torch.dtype | None = None,
    exits: str | PathLike[str] | None = None,
    **hub_options: Any,
) -> Checkpoint:
    """Read a checkpoint. Raise `CheckpointError` if it cannot be loaded.

    config: replaces the configuration in the source.
    dtype: precision to which a GGUF file is dequantized.
    exits: folder or Hub name of retrofitted exits for this model.
    hub_options: passed to the Hub client.
    """
    if is_gguf(source):
        from nvium_core.model.gguf import read_gguf

        checkpoint = read_gguf(Path(source), config, dtype)
    else:
        checkpoint = read_checkpoint(source, config, **hub_options)
    return checkpoint if exits is None else with_exits_of(checkpoint, exits, **hub_options)
