"""Loads a model and its tokenizer by folder, Hub name or GGUF file."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import nn
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from nvium_core.choices import Device, Precision, Quantization, Weights
from nvium_core.model.checkpoint import MODEL_FOLDER, RECIPE_FILE, CheckpointError, one_line, resolve_folder
from nvium_core.model.nvium import Nvium
from nvium_core.model.quantized import quantize_model
from nvium_core.model.source import is_gguf
from nvium_core.text.gguf_tokenizer import TokenizerError, gguf_tokenizer

CHECKPOINTS = Path(__file__).parent / "checkpoints"


@dataclass(frozen=True)
class LoadedModel:
    """A model on its device with its tokenizer. `name`: the last part of its folder or Hub name, or its training run's.
    `folder`: where it was read from, None if built in memory."""

    name: str
    model: Nvium
    tokenizer: PreTrainedTokenizerFast
    folder: Path | None = None


def load_model(
    source: str | None = None,
    device: Device = "auto",
    dtype: Precision = "auto",
    kind: type[Nvium] = Nvium,
    weights: Weights = "auto",
    exits: str | None = None,
) -> LoadedModel:
    """Load a folder, Hub name or GGUF file; None is the bundled model. `weights` q8 or q4 rounds backbone and head.

    `auto` is CUDA with bfloat16 if available, or float16 before compute capability 8. On a CPU a GGUF file keeps its
    precision and the groups that the engine supports; other groups become bfloat16.

    `kind` is the class to load it as. `exits` is a folder or Hub name of exits made for the model. Raises
    `CheckpointError` naming what is wrong.
    """
    disable_progress_bar()
    path = Path(source) if source else embedded_model()
    place = resolve_device(device)
    if is_gguf(path):
        loaded = load_gguf(path, place, dtype, kind, weights, exits)
        quantize_as(loaded.model, weights)
        return loaded
    folder = resolve_folder(path)
    model = kind.from_pretrained(folder, dtype=resolve_dtype(dtype, place), exits=exits).eval()
    nn.Module.to(model, place)
    quantize_as(model, weights)
    return LoadedModel(model_name(path), model, load_tokenizer(folder, model), folder.resolve())


def quantize_as(model: Nvium, weights: Weights) -> None:
    """Quantize as `--weights` says. Raises `CheckpointError` if the precision cannot hold the result."""
    if weights in {"q8", "q4"}:
        try:
            quantize_model(model, weights)
        except ValueError as error:
            raise CheckpointError(f"weights {weights}: {error}") from error


def model_name(source: Path) -> str:
    """The last part of a folder or Hub name; the run's name for a training run's `model/`."""
    path = source.resolve() if source.exists() else source
    is_runs = path.name == MODEL_FOLDER and (path.parent / RECIPE_FILE).is_file()
    return path.parent.name if is_runs else path.name


def load_gguf(
    path: Path,
    device: torch.device,
    dtype: Precision,
    kind: type[Nvium],
    weights: Weights,
    exits: str | None = None,
) -> LoadedModel:
    """A GGUF file's model, under the file's name without its suffix."""
    from nvium_core.model.gguf import forget_gguf, open_gguf
    from nvium_core.model.gguf_groups import has_groups, hold_groups

    tokenizer = gguf_file_tokenizer(path)
    keeps_groups = weights == "auto" and dtype == "auto" and device.type == "cpu" and has_groups(open_gguf(path))
    precision = gguf_precision(dtype, device, in_groups=keeps_groups or weights in get_args(Quantization))
    model = kind.from_pretrained(path, dtype=precision, exits=exits).eval()
    if keeps_groups:
        hold_groups(model, open_gguf(path))
    forget_gguf()
    nn.Module.to(model, device)
    check_vocabulary(tokenizer, model, path)
    return LoadedModel(path.stem, model, tokenizer, path.resolve())


def gguf_precision(dtype: Precision, device: torch.device, *, in_groups: bool) -> torch.dtype | Literal["auto"]:
    """Precision of a GGUF file on a CPU: its own, or float32, which holds dequantised groups exactly."""
    if dtype != "auto" or device.type != "cpu":
        return resolve_dtype(dtype, device)
    return torch.float32 if in_groups else "auto"


def gguf_file_tokenizer(path: Path) -> PreTrainedTokenizerFast:
    """The tokenizer of a GGUF file. Raises `CheckpointError` for an unknown or damaged one."""
    from nvium_core.model.gguf import NAMED_ENDS, open_gguf

    file = open_gguf(path)
    try:
        return gguf_tokenizer(file.get, NAMED_ENDS)
    except TokenizerError as error:
        raise CheckpointError(f"{path}: {error}") from error
    except Exception as error:  # tokenizers raises anything for inconsistent lists
        raise CheckpointError(
            f"{path}: its tokenizer is damaged ({type(error).__name__}: {one_line(error)})"
        ) from error


def check_vocabulary(tokenizer: PreTrainedTokenizerFast, model: Nvium, source: Path) -> None:
    if len(tokenizer) > model.config.vocab_size:
        raise CheckpointError(f"{source}: {len(tokenizer)} tokens, but the model knows {model.config.vocab_size}")


def embedded_model() -> Path:
    """The folder of the model in this package."""
    folders = sorted(path.parent for path in CHECKPOINTS.glob("*/config.json"))
    if len(folders) != 1:
        raise CheckpointError(f"{CHECKPOINTS}: expected one bundled model, found {len(folders)}")
    return folders[0]


def resolve_device(device: Device) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise CheckpointError("device cuda: this machine, or this build of PyTorch, has none")
    return torch.device(device)


def resolve_dtype(dtype: Precision, device: torch.device) -> torch.dtype:
    if dtype == "auto" and device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    if dtype == "auto":
        return torch.float32
    named: torch.dtype = getattr(torch, dtype)
    return named


def load_tokenizer(folder: Path, model: Nvium) -> PreTrainedTokenizerFast:
    """The folder's fast tokenizer, checked to fit the model's vocabulary."""
    tokenizer = fast_tokenizer(folder)
    check_vocabulary(tokenizer, model, folder)
    return tokenizer


def source_tokenizer(source: str) -> PreTrainedTokenizerFast:
    """Only the tokenizer of a folder, Hub name or GGUF file."""
    path = Path(source)
    return gguf_file_tokenizer(path) if is_gguf(path) else fast_tokenizer(resolve_folder(path))


def fast_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, mistral_format=False)
    except Exception as error:  # transformers and tokenizers raise anything for damaged files
        reason = (str(error).splitlines() or [repr(error)])[0]
        raise CheckpointError(f"{folder}: no usable tokenizer ({reason})") from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise CheckpointError(f"{folder}: its tokenizer has no tokenizer.json, which streaming needs")
    if not isinstance(tokenizer.model_max_length, int | float):  # transformers warns about prompts longer than this
        raise CheckpointError(f"{folder / 'tokenizer_config.json'}: model_max_length must be a number")
    return tokenizer
