"""Reads a model folder in one of three layouts: ours, the authors' published one, or that of a Llama or relative.

The result is a configuration, and tensors under our names. The weights must be safetensors.
"""

import errno
import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, StrictDataclassError
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from nvium_core.errors import CheckpointError, one_line
from nvium_core.model.backbones import FAMILIES, Family, arranged, backbone_fields
from nvium_core.model.config import NviumConfig, check_sizes
from nvium_core.model.stored import FLOATS, StoredMatrix, check_finite

MODEL_FOLDER = "model"  # in the folder of a training run
RECIPE_FILE = "recipe.json"  # in the folder of a training run
WEIGHTS, WEIGHTS_INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")
PART = re.compile(r"part-?\d+of\d+$|split-[a-z]+$")  # of a file that was cut to upload it
ADAPTER_CONFIG = "adapter_config.json"  # of a LoRA adapter
SUFFIXES = (".json", ".model", ".jinja", ".yaml", ".safetensors")
MAX_TEXT_BYTES = 2**28  # of a file that is not weights; the largest tokenizers have 35 MB
MAX_TENSORS = 20_000  # far more than any real model has; reading a name costs more than its bytes
EXITS_WEIGHTS = "exits.safetensors"  # retrofitted exits, without their base model
HUB_FILES = ["*.json", "*.model", "*.jinja", "README.md", ".hydra/config.yaml", WEIGHTS, EXITS_WEIGHTS]
PUBLISHED_EXTRAS = Path(".hydra/config.yaml")  # the published layout's configuration of the exits
RECOMPUTED = re.compile(r"rotary_emb\.(inv_freq|original_inv_freq|cos_cached|sin_cached)$")
TIED = re.compile(r"^early_lm_heads\.\d+\.weight$")  # copies of the head in the published layout
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

OTHER_NAMES = {
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

GATE = "model.early_exit_gate."
"""Prefix of Ouro's gate, which all its early exits share."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A model read from `folder`: its configuration, and its tensors under our names. Matrices are `StoredMatrix`.

    dtype: precision of the stored weights.
    exits_folder: the folder of the exits, if they come from another folder.
    sampling: sampling parameters that a GGUF file suggests, under transformers' names.
    """

    config: NviumConfig
    tensors: dict[str, Tensor]
    folder: Path
    dtype: torch.dtype
    exits_folder: Path | None = None
    sampling: dict[str, float] = field(default_factory=dict)

    def numbers(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return an ordinary tensor. Raise `CheckpointError` if it has NaN or infinite values."""
        tensor = self.tensors[name]
        return (tensor.finite_numbers() if isinstance(tensor, StoredMatrix) else tensor).to(dtype)

    def stored(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return a tensor in a precision; a matrix stays as it is stored."""
        tensor = self.tensors[name]
        if not isinstance(tensor, StoredMatrix):
            return tensor.to(dtype)
        return StoredMatrix(tensor.content, tensor.kind, dtype, rows=tensor.rows, place=tensor.place)

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
            is_exits = all(" exits." in problem for problem in problems)
            place = self.exits_folder if self.exits_folder and is_exits else self.folder
            more = f" (and {len(problems) - 5} more)" if len(problems) > 5 else ""
            raise CheckpointError(f"{place}: " + "; ".join(sorted(problems)[:5]) + more)


def read_checkpoint(
    source: str | os.PathLike[str], config: NviumConfig | None = None, **hub_options: Any
) -> Checkpoint:
    """Read a model from a folder or the Hub. `config` replaces config.json. The Hub client gets `hub_options`."""
    folder = resolve_folder(source, **hub_options)
    if (folder / ADAPTER_CONFIG).exists():
        raise CheckpointError(f"{folder / ADAPTER_CONFIG}: LoRA adapters are not supported; merge it into its model")
    config = config or read_config(folder)
    tensors = {name: tensor for name, tensor in read_tensors(folder).items() if not RECOMPUTED.search(name)}
    tensors = stored_matrices(folder, tensors)
    _drop_tied_heads(folder, config, tensors)
    dtype = next((tensor.dtype for tensor in tensors.values()), torch.float32)
    fields = parse_file(folder / "config.json", json.loads)
    family = FAMILIES.get(str(fields.get("model_type")) if isinstance(fields, dict) else "", Family())
    tensors = arranged(_renamed(folder, tensors, config, family), config, family.rows, adds_one=family.adds_one)
    return Checkpoint(config=config, tensors=tensors, folder=folder, dtype=dtype)


def resolve_folder(source: str | os.PathLike[str], **hub_options: Any) -> Path:
    """Return the model's local folder. If `source` is a Hub name, download the model first."""
    folder = Path(source)
    if (folder / MODEL_FOLDER / "config.json").is_file() and not (folder / "config.json").exists():
        raise CheckpointError(f"{source}: is a training run; pass its model, {folder / MODEL_FOLDER}")
    if folder.is_dir():
        check_files(folder)
        return folder
    if folder.exists():
        raise CheckpointError(f"{source}: not a GGUF file; pass a model folder or a GGUF file")
    if folder.is_absolute() or len(folder.parts) != 2:
        raise CheckpointError(f"{source}: no such folder, file or Hub name")
    try:
        folder = Path(snapshot_download(str(source), allow_patterns=HUB_FILES, **hub_options))
        if shards := sorted({*weight_map(folder).values()}):
            snapshot_download(str(source), allow_patterns=shards, **hub_options)
        return folder
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError(f"{source}: no such folder, and the download from the Hub failed ({reason})") from error


def check_files(folder: Path) -> None:
    """Raise `CheckpointError` unless the files are regular: a pipe would block, and a device would never end."""
    for file in [*folder.iterdir(), folder / PUBLISHED_EXTRAS]:
        if file.suffix in SUFFIXES and file.exists():
            if not file.is_file():
                raise CheckpointError(f"{file}: is not a regular file")
            if file.suffix != ".safetensors" and (num_bytes := file.stat().st_size) > MAX_TEXT_BYTES:
                raise CheckpointError(f"{file}: has {num_bytes:,} bytes; at most {MAX_TEXT_BYTES:,} are read")


def read_config(folder: Path) -> NviumConfig:
    """Read config.json in any of the three layouts."""
    path = folder / "config.json"
    if not path.exists():
        files = [str(file) for file in sorted(folder.glob("*.gguf"))]
        raise CheckpointError(f"{path}: no such file; pass a model folder, or {' or '.join(files) or 'a GGUF file'}")
    fields = parse_file(path, json.loads)
    if not isinstance(fields, dict):
        raise CheckpointError(f"{path}: not a JSON object")
    try:
        check_sizes(fields)  # before transformers builds lists of these lengths
        for name in ("rope_scaling", "rope_parameters"):
            if not isinstance(fields.get(name) or {}, dict):
                raise ValueError(f"{name} must be an object, got {fields[name]!r}")
        if fields.get("eos_token_id") == -1:  # in some files: none
            fields["eos_token_id"] = None
        return NviumConfig(**_nvium_fields(folder, fields))
    except CheckpointError:
        raise
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, StrictDataclassError) as error:
        raise CheckpointError(f"{path}: {one_line(error.__cause__ or error)}") from error


def _nvium_fields(folder: Path, fields: dict[str, Any]) -> dict[str, Any]:
    model_type = fields.pop("model_type", None)
    # transformers would read the first as a file, and has a form of its own for the infinity in the last
    for unused in ("transformers_weights", "dtype", "torch_dtype", "time_step_limit"):
        fields.pop(unused, None)
    if model_type == "nvium":
        return fields
    if "NviumModel" in (fields.get("architectures") or []):
        return fields | _published_fields(folder / PUBLISHED_EXTRAS, fields.get("num_hidden_layers"))
    if model_type in FAMILIES:
        return backbone_fields(model_type, fields)
    known = ", ".join(["nvium", *FAMILIES])
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
    """Read the safetensors file or, if there is an index, the tensors that the index names from their shards."""
    index = weight_map(folder)
    if not index:
        if (folder / WEIGHTS).exists():
            return read_safetensors(folder / WEIGHTS)
        if any(SHARD.fullmatch(file.name) for file in folder.iterdir()):
            raise CheckpointError(f"{folder}: has shards, but no {WEIGHTS_INDEX}; download it too")
        raise CheckpointError(f"{folder}: no {WEIGHTS}; weights must be safetensors or GGUF")
    shards = sorted({*index.values()})
    if missing := [shard for shard in shards if not (folder / shard).exists()]:
        raise CheckpointError(f"{folder}: incomplete download: {', '.join(missing[:5])} missing; download it again")
    found = {shard: read_safetensors(folder / shard) for shard in shards}
    return {name: found[shard][name] for name, shard in index.items() if name in found[shard]}


def read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, "pt") as file:
            names = file.offset_keys()  # as they are stored: the first one decides about `dtype="auto"`
            check_count(path, len(names))
            return {name: file.get_tensor(name) for name in names}
    except (OSError, MemoryError, RuntimeError, SafetensorError) as error:
        raise unreadable(path, error) from error


def unreadable(path: Path, error: Exception) -> CheckpointError:
    """Say why a file cannot be read. Only a damaged one must be downloaded again."""
    if isinstance(error, MemoryError) or os.strerror(errno.ENOMEM) in str(error):
        size = path.stat().st_size / 1e9
        return CheckpointError(f"{path}: not enough memory to map its {size:.2f} GB; see `ulimit -v`")
    if isinstance(error, OSError):
        return CheckpointError(f"{path}: {error.strerror or error}")
    if PART.search(path.name):
        return CheckpointError(f"{path}: is a part of a file; join the parts in order, such as with cat")
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


def stored_matrices(folder: Path, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the matrices as `StoredMatrix`. Raise `CheckpointError` for tensors that are not finite floats."""
    return {name: stored_floats(tensor, f"{folder}: tensor {name}") for name, tensor in tensors.items()}


def stored_floats(tensor: Tensor, place: str) -> Tensor:
    """Return a matrix as `StoredMatrix`, whose numbers are checked when it is packed or converted, so that no page is
    read twice. Return another tensor itself. Raise `CheckpointError` if it has NaN or infinite values."""
    if tensor.dtype not in FLOATS:
        dtype, *supported = (str(each).removeprefix("torch.") for each in (tensor.dtype, *FLOATS))
        raise CheckpointError(f"{place} has dtype {dtype}; supported: {', '.join(supported)}")
    if tensor.dim() == 2:
        return StoredMatrix(tensor, place=place)
    check_finite(tensor, place)
    return tensor


def weight_map(folder: Path) -> dict[str, str]:
    """Return the shard of each tensor according to the index; nothing if there is no index."""
    path = folder / WEIGHTS_INDEX
    if not path.exists():
        return {}
    try:
        index: dict[str, Any] = dict(parse_file(path, json.loads)["weight_map"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: not a valid shard index ({error!r})") from error
    check_count(path, len(index))
    for name in index.values():
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise CheckpointError(f"{path}: {name!r} is not a safetensors file name without folders")
    return index


def check_count(path: Path, num_tensors: int) -> None:
    if num_tensors > MAX_TENSORS:
        raise CheckpointError(f"{path}: has {num_tensors:,} tensors; at most {MAX_TENSORS:,} are supported")


def final_norm(config: NviumConfig) -> str:
    """Return our prefix of Llama's `model.norm`."""
    return "model.norm." if config.norms_loops else f"exits.{config.num_exits - 1}.norm."


def _renamed(folder: Path, tensors: dict[str, Tensor], config: NviumConfig, family: Family) -> dict[str, Tensor]:
    def ours(name: str) -> str:
        name = ".".join(family.names.get(part, part) for part in name.split("."))
        for pattern, replacement in (OTHER_NAMES | {r"^model\.norm\.": final_norm(config)}).items():
            name = re.sub(pattern, replacement.replace("{last}", str(config.num_exits - 1)), name)
        return name

    if config.router == "linear" and "exits.0.router.head.weight" not in tensors:
        tensors = with_gates(folder, tensors, config)

    renamed = {ours(name): tensor for name, tensor in tensors.items()}
    if len(renamed) < len(tensors):
        twice = [name for name in tensors if name != ours(name) and ours(name) in tensors]
        raise CheckpointError(f"{folder}: tensors stored under two names: {', '.join(twice)}")
    return renamed


def with_gates(folder: Path, tensors: dict[str, Tensor], config: NviumConfig) -> dict[str, Tensor]:
    """Give each early exit a copy of the shared gate. Raise `CheckpointError` if it is missing or has another shape."""
    others, gates = dict(tensors), dict[str, Tensor]()
    for part, shape in (("weight", (1, config.hidden_size)), ("bias", (1,))):
        if (gate := others.pop(GATE + part, None)) is None:
            raise CheckpointError(f"{folder}: missing tensor {GATE}{part}")
        if tuple(gate.shape) != shape:
            raise CheckpointError(f"{folder}: tensor {GATE}{part} has shape {[*gate.shape]}, expected {[*shape]}")
        numbers = gate.finite_numbers() if isinstance(gate, StoredMatrix) else gate
        gates |= {f"exits.{k}.router.head.{part}": numbers.clone() for k in range(config.num_exits - 1)}
    return others | gates


def parse_file(path: Path, parser: Callable[[str], Any]) -> Any:
    try:
        return parser(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise CheckpointError(f"{path}: not valid {path.suffix[1:].upper()}: {one_line(error)}") from error
