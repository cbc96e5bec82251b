"""Converts a model of any supported layout to a folder in our layout.

At most one converted shard is in memory at a time. A failed conversion leaves no files behind, because the folder has
a temporary name until all files are written.
"""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import reduce
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from rich.console import Console
from rich.progress import track
from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers.utils import CONFIG_NAME, GENERATION_CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME

from nvium_core.choices import Precision
from nvium_core.errors import CheckpointError, NviumError
from nvium_core.loading import gguf_file_tokenizer, load_tokenizer
from nvium_core.model.checkpoint import Checkpoint, parse_file
from nvium_core.model.config import NviumConfig
from nvium_core.model.nvium import Nvium
from nvium_core.model.source import is_gguf

TOKENIZER_FILE = "tokenizer.json"
COMPANIONS = (
    TOKENIZER_FILE,
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    GENERATION_CONFIG_NAME,
)
"""Files that are copied unchanged, if they exist."""


class ConversionError(NviumError):
    """The target cannot be written."""


def convert(
    source: str | PathLike[str],
    target: str | PathLike[str],
    dtype: Precision = "auto",
    *,
    exits: str | PathLike[str] | None = None,
    max_shard_bytes: int = 5_000_000_000,
) -> str:
    """Write the model `source` to the folder `target`. Return a one-line summary.

    source: a folder, Hub name or GGUF file.
    dtype: auto keeps the stored precision. If tensors have different precisions, auto is the widest of them.
    exits: folder or Hub name of retrofitted exits to merge into the model.

    Raise `CheckpointError` if the source cannot be loaded, or `ConversionError` if the target is not empty or cannot be
    written.
    """
    place = checked_target(Path(target))
    wanted = None if dtype == "auto" else getattr(torch, dtype)
    checkpoint, model = Nvium.read_checked(source, None, exits)
    has_tokenizer = is_gguf(checkpoint.folder) or (checkpoint.folder / TOKENIZER_FILE).exists()
    for file in companions(checkpoint.folder):
        if file.suffix == ".json" and not isinstance(parse_file(file, json.loads), dict):
            raise CheckpointError(f"{file}: not a JSON object")
    if has_tokenizer:
        load_tokenizer(checkpoint.folder, model)
    widest = reduce(torch.promote_types, (tensor.dtype for tensor in checkpoint.tensors.values()))
    precision = wanted or (checkpoint.dtype if is_gguf(source) else widest)
    with atomic_folder(place) as folder:
        write_config(checkpoint.config, precision, folder)
        write_tensors(checkpoint, precision, max_shard_bytes, folder)
        if is_gguf(source):
            gguf_file_tokenizer(checkpoint.folder).save_pretrained(folder)
        for file in companions(checkpoint.folder):
            shutil.copyfile(file, folder / file.name)
    hint = "" if has_tokenizer else f"; no {TOKENIZER_FILE}, so the server cannot load the folder"
    return f"{target}: {summary(checkpoint, precision)}{hint}"


def summary(checkpoint: Checkpoint, precision: torch.dtype) -> str:
    config, num_exits, num_loops = checkpoint.config, checkpoint.config.num_exits, checkpoint.config.num_loops
    num_parameters = sum(tensor.numel() for tensor in checkpoint.tensors.values())
    dense = f"a univium ({num_loops} loops)" if num_loops > 1 else "a univium (dense)"
    kind = f"a {num_exits}-vium, exits after {', '.join(config.exit_places)}" if num_exits > 1 else dense
    numbers = f"{num_parameters:,} parameters in {str(precision).removeprefix('torch.')}"
    return f"{kind}, {numbers}, {num_parameters * precision.itemsize / 1e6:,.1f} MB"


def checked_target(target: Path) -> Path:
    """Return the target with links resolved. Raise `ConversionError` if it is a file or a folder that is not empty."""
    if target.exists() and not target.is_dir():
        raise ConversionError(f"{target}: is a file; choose a folder")
    if target.exists() and any(target.iterdir()):
        raise ConversionError(f"{target}: is not empty; choose another folder")
    return target.resolve()


def companions(folder: Path) -> list[Path]:
    return [folder / name for name in COMPANIONS if (folder / name).exists()]


@contextmanager
def atomic_folder(place: Path) -> Iterator[Path]:
    """Yield a temporary folder. Rename it to `place` on success, and remove it on failure."""
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=place.parent, prefix=f".{place.name}.") as scratch:
            folder = Path(scratch) / place.name
            folder.mkdir()
            yield folder
            folder.replace(place)
    except (OSError, SafetensorError) as error:
        raise ConversionError(f"{place}: cannot be written ({getattr(error, 'strerror', None) or error})") from error


def write_config(config: NviumConfig, precision: torch.dtype, folder: Path) -> None:
    config.architectures = ["NviumForCausalLM"]
    config.dtype = precision
    vars(config).pop("auto_map", None)  # names Python files of the source, which are not copied
    config.to_json_file(folder / CONFIG_NAME)


def write_tensors(checkpoint: Checkpoint, precision: torch.dtype, max_shard_bytes: int, folder: Path) -> None:
    """Write one safetensors file or, above `max_shard_bytes`, numbered shards and an index, like `save_pretrained`."""
    tensors = checkpoint.tensors
    sizes = {name: torch.empty(tensors[name].shape, dtype=precision, device="meta") for name in sorted(tensors)}
    split = split_torch_state_dict_into_shards(sizes, max_shard_size=max_shard_bytes)
    shards = split.filename_to_tensors.items()
    for file, names in track(shards, "writing", len(shards), console=Console(stderr=True), transient=True):
        shard = {name: checkpoint.numbers(name, precision).contiguous() for name in names}
        save_file(shard, folder / file, metadata={"format": "pt"})
        shutil.copymode(folder / CONFIG_NAME, folder / file)  # safetensors may make files readable by the owner only
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
