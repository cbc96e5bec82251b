"""Reads a checkpoint from a folder, a Hub name or a GGUF file, optionally with exits from a separate folder."""

from os import PathLike
from pathlib import Path
from typing import Any

from nvium_core.model.checkpoint import Checkpoint, read_checkpoint
from nvium_core.model.config import NviumConfig
from nvium_core.model.exits_file import with_exits_of
from nvium_core.model.gguf import read_gguf
from nvium_core.model.gguf_header import MAGIC, OLD_MAGICS


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
