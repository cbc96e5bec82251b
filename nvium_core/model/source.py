"""Reads a configuration and tensors from a folder, a Hub name or a GGUF file, whose library only that needs."""

from os import PathLike
from pathlib import Path
from typing import Any

import torch

from nvium_core.model.checkpoint import Checkpoint, read_checkpoint
from nvium_core.model.config import NviumConfig

SUFFIX = ".gguf"


def is_gguf(source: object) -> bool:
    return str(source).endswith(SUFFIX) and Path(str(source)).is_file()


def read_source(
    source: str | PathLike[str],
    config: NviumConfig | None = None,
    dtype: torch.dtype | None = None,
    **hub_options: Any,
) -> Checkpoint:
    """`dtype`: precision of dequantised groups. Raises `CheckpointError` naming what is wrong."""
    if is_gguf(source):
        from nvium_core.model.gguf import read_gguf

        return read_gguf(Path(source), config, dtype)
    return read_checkpoint(source, config, **hub_options)
