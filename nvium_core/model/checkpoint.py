"""Reads a model folder in one of three layouts: ours, the authors' published one, or that of a Llama or relative.

The result is a configuration, and tensors under our names. The weights must be safetensors.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

import torch
import yaml
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, StrictDataclassError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from nvium_core.errors import NviumError
from nvium_core.model.backbones import BACKBONES, backbone_fields
from nvium_core.model.config import NviumConfig, check_sizes

MODEL_FOLDER = "model"  # in the folder of a training run
RECIPE_FILE = "recipe.json"  # in the folder of a training run
WEIGHTS, WEIGHTS_INDEX = "model.safetensors", "model.safetensors.index.json"
EXITS_WEIGHTS = "exits.safetensors"  # retrofitted exits, without their base model
HUB_FILES = ["*.json", "*.model", "*.jinja", "README.md", ".hydra/config.yaml", WEIGHTS, EXITS_WEIGHTS]
PUBLISHED_EXTRAS = Path(".hydra/config.yaml")  # the published layout's configuration of the exits
RECOMPUTED = re.compile(r"rotary_emb\.(inv_freq|original_inv_freq|cos_cached|sin_cached)$")
TIED = re.compile(r"^early_lm_heads\.\d+\.weight$")  # copies of the head in the published layout
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

STORED = {"float64": torch.float64, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
"""Supported precisions of stored weights."""

PUBLISHED_NAMES = {
    r"^model\.norm\.": "exits.{last}.norm.",
    r"^final_adapter\.0\.": "exits.{last}.adapter.up.",
    r"^final_adapter\.2\.": "exits.{last}.adapter.down.",
    r"^early_norms\.(\d+)\.": r"exits.\1.norm.",
    r"^early_adapters\.(\d+)\.0\.": r"exits.\1.adapter.up.",
    r"^early_adapters\.(\d+)\.2\.": r"exits.\1.adapter.down.",
    r"^router_layers\.(\d+)\.layers\.0\.(fc[12])\.": r"exits.\1.router.\2.",
    r"^router_final_norms\.(\d+)\.": r"exits.\1.router.norm.",
    r"^router_heads\.(\d+)\.": r"exits.\1.router.head.",
}
"""Tensor names in the published layout → ours. `{last}` is the index of the last exit."""


class CheckpointError(NviumError, ValueError):
    """A model cannot be loaded. The message names the file, field or tensor."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A model read from `folder`: its configuration, and its tensors under our names.

    sampling: sampling parameters that a GGUF file suggests, under transformers' names.
    """

    config: NviumConfig
    tensors: dict[str, Tensor]
    folder: Path
    sampling: dict[str, float] = field(default_factory=dict)

    @property
    def dtype(self) -> torch.dtype:
        """Precision of the stored weights."""
        return next(iter(self.tensors.values())).dtype

    def check_against(self, model: nn.Module) -> None:
        """Raise `CheckpointError` unless tensor names and shapes equal the model's."""
        expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        if self.config.tie_word_embeddings:
            expected.pop("lm_head.weight")
        found = {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}
        problems = [f"missing tensor {name}" for name in expected.keys() - found.keys()]
        problems += [f"unexpected tensor {name}" for name in found.keys() - expected.keys()]
        problems += [
            f"tensor {name} has shape {list(found[name])}, expected {list(expected[name])}"
            for name in expected.keys() & found.keys()
            if expected[name] != found[name]
        ]
        if problems:
            more = f" (and {len(problems) - 5} more)" if len(problems) > 5 else ""
            raise CheckpointError(f"{self.folder}: " + "; ".join(sorted(problems)[:5]) + more)


def read_checkpoint(source: str | PathLike[str], config: NviumConfig | None = None, **hub_options: Any) -> Checkpoint:
    """Read a model from a folder or the Hub. `config` replaces config.json. The Hub client gets `hub_options`."""
    folder = resolve_folder(source, **hub_options)
    config = config or read_config(folder)
    tensors = {name: tensor for name, tensor in read_tensors(folder).items() if not RECOMPUTED.search(name)}
    check_numbers(folder, tensors)
    _drop_tied_heads(folder, config, tensors)
    return Checkpoint(config=config, tensors=_renamed(folder, tensors, config.num_exits), folder=folder)


def resolve_folder(source: str | PathLike[str], **hub_options: Any) -> Path:
    """Return the model's local folder. If `source` is a Hub name, download the model first."""
    folder = Path(source)
    if (folder / MODEL_FOLDER / "config.json").is_file() and not (folder / "config.json").exists():
        raise CheckpointError(f"{source}: is a training run; pass its model, {folder / MODEL_FOLDER}")
    if folder.is_dir():
        return folder
    if folder.exists():
        raise CheckpointError(f"{source}: not a GGUF file; pass a model folder or a GGUF file")
    if folder.is_absolute() or len(folder.parts) != 2:
        raise CheckpointError(f"{source}: no such folder, file or Hub name")
    try:
        folder = Path(snapshot_download(str(source), allow_patterns=HUB_FILES, **hub_options))
        if not (folder / WEIGHTS).exists() and (shards := weight_files(folder)):
            snapshot_download(str(source), allow_patterns=shards, **hub_options)
        return folder
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError(f"{source}: no such folder, and the download from the Hub failed ({reason})") from error


def read_config(folder: Path) -> NviumConfig:
    """Read config.json in any of the three layouts."""
    path = folder / "config.json"
    if not path.exists():
        raise CheckpointError(f"{path}: no such file; pass a model folder, or the path of a GGUF file")
    fields = parse_file(path, json.loads)
    if not isinstance(fields, dict):
        raise CheckpointError(f"{path}: not a JSON object")
    try:
        check_sizes(fields)  # before transformers builds lists of these lengths
        return NviumConfig(**_nvium_fields(folder, fields))
    except CheckpointError:
        raise
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, StrictDataclassError) as error:
        raise CheckpointError(f"{path}: {one_line(error.__cause__ or error)}") from error


def _nvium_fields(folder: Path, fields: dict[str, Any]) -> dict[str, Any]:
    model_type = fields.pop("model_type", None)
    fields.pop("transformers_weights", None)  # transformers would read a file of this name
    if model_type == "nvium":
        return fields
    if "NviumModel" in (fields.get("architectures") or []):
        return fields | _published_fields(folder / PUBLISHED_EXTRAS, fields.get("num_hidden_layers"))
    if model_type in BACKBONES:
        return backbone_fields(model_type, fields)
    known = ", ".join(["nvium", *BACKBONES])
    raise CheckpointError(f"{folder / 'config.json'}: model_type {model_type!r} is not supported; supported: {known}")


def _published_fields(path: Path, num_layers: Any) -> dict[str, Any]:
    extras = parse_file(path, yaml.safe_load)
    try:
        if not extras["tying"]["tie_early_to_final"]:
            raise CheckpointError(f"{path}: tying.tie_early_to_final must be true; separate heads are not supported")
        has_adapter = extras["early_adapter"]["enabled"]
        return {
            "exit_layers": [*extras["early_layer_idx"], num_layers],
            "router_hidden_size": extras["router"]["intermediate_size"],
            "router_temperature": extras["router"]["router_temp"],
            "adapter_hidden_size": extras["early_adapter"]["dim"] if has_adapter else 0,
        }
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: missing field {error}") from error


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Read every tensor of the folder's safetensors file or shards, under its stored name."""
    shards = weight_files(folder)
    if not shards:
        raise CheckpointError(f"{folder}: no {WEIGHTS}; weights must be safetensors or GGUF")
    tensors: dict[str, Tensor] = {}
    for shard in shards:
        tensors |= read_safetensors(folder / shard)
    return tensors


def read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error
    except SafetensorError as error:
        raise damaged(path, error) from error


def damaged(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"{path}: damaged or incomplete ({one_line(error)}); download or copy it again")


def _drop_tied_heads(folder: Path, config: NviumConfig, tensors: dict[str, Tensor]) -> None:
    """Drop stored copies of a tied head. If the stored head differs from the embedding, untie the configuration."""
    if config.tie_word_embeddings and HEAD in tensors:
        if torch.equal(tensors.setdefault(EMBEDDING, tensors[HEAD]), tensors[HEAD]):
            del tensors[HEAD]
        else:
            config.tie_word_embeddings = False
    head = tensors.get(HEAD, tensors.get(EMBEDDING))
    for name in [name for name in tensors if TIED.match(name)]:
        if head is None or not torch.equal(tensors.pop(name), head):
            raise CheckpointError(f"{folder}: tensor {name} must equal the head; separate heads are not supported")


def check_numbers(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Raise `CheckpointError` for weights that are not finite floats."""
    for name, tensor in tensors.items():
        if tensor.dtype not in STORED.values():
            dtype = str(tensor.dtype).removeprefix("torch.")
            raise CheckpointError(f"{folder}: tensor {name} has dtype {dtype}; supported: {', '.join(STORED)}")
        if tensor.numel() and not all(map(torch.isfinite, torch.aminmax(tensor))):
            raise CheckpointError(f"{folder}: tensor {name} has NaN or infinite values")


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or repr(error)


def weight_files(folder: Path) -> list[str]:
    """Return the name of the single weight file. If it is missing, return the names of the shards in the index."""
    if (folder / WEIGHTS).exists():
        return [WEIGHTS]
    index = folder / WEIGHTS_INDEX
    if not index.exists():
        return []
    try:
        names = set(parse_file(index, json.loads)["weight_map"].values())
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index}: not a valid shard index ({error!r})") from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise CheckpointError(f"{index}: {name!r} is not a safetensors file name without folders")
    return sorted(names)


def _renamed(folder: Path, tensors: dict[str, Tensor], num_exits: int) -> dict[str, Tensor]:
    """Rename published and Llama tensors to our names."""

    def ours(name: str) -> str:
        for pattern, replacement in PUBLISHED_NAMES.items():
            name = re.sub(pattern, replacement.replace("{last}", str(num_exits - 1)), name)
        return name

    renamed = {ours(name): tensor for name, tensor in tensors.items()}
    if len(renamed) < len(tensors):
        twice = [name for name in tensors if name != ours(name) and ours(name) in tensors]
        raise CheckpointError(f"{folder}: tensors stored under two names: {', '.join(twice)}")
    return renamed


def parse_file(path: Path, parser: Callable[[str], Any]) -> Any:
    try:
        return parser(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise CheckpointError(f"{path}: not valid {path.suffix[1:].upper()}: {one_line(error)}") from error
