"""Loads a model and its tokenizer from a folder, Hub name or GGUF file."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import nn
from transformers import PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from nvium_core.choices import Device, Precision, Quantization, Weights
from nvium_core.errors import CheckpointError, one_line
from nvium_core.model.checkpoint import MODEL_FOLDER, RECIPE_FILE, resolve_folder
from nvium_core.model.gguf import NAMED_ENDS, close_gguf, open_gguf
from nvium_core.model.nvium import Nvium
from nvium_core.model.source import digest_of, is_gguf
from nvium_core.model.stored import quantize_model, weight_type
from nvium_core.text.folder_tokenizer import folder_tokenizer
from nvium_core.text.gguf_tokenizer import TokenizerError, gguf_tokenizer

CHECKPOINTS = Path(__file__).parent / "checkpoints"


@dataclass(frozen=True)
class LoadedModel:
    """A model on its device, with its tokenizer.

    name: see `model_name`.
    folder: the model folder or GGUF file; None for a model that was built in memory.
    """

    name: str
    model: Nvium
    tokenizer: PreTrainedTokenizerFast
    folder: Path | None = None

    def precision(self) -> dict[str, str | float]:
        """Return the precision of the stored weights and of arithmetic.

        weights: the type of most numbers, such as Q4_K.
        """
        kind, bits = weight_type(self.model)
        dtype = str(self.model.dtype).removeprefix("torch.")
        return {"weights": kind, "bits_per_weight": round(bits, 2), "arithmetic": dtype}

    def digest(self) -> str:
        return digest_of(self.model.state_dict(), self.model.config)


def load_model(
    source: str | None = None,
    device: Device = "auto",
    dtype: Precision = "auto",
    kind: type[Nvium] = Nvium,
    weights: Weights = "auto",
    exits: str | None = None,
) -> LoadedModel:
    """Load a folder, Hub name or GGUF file; None is the bundled model. Raise `CheckpointError` if it cannot be loaded.

    On a CPU the matrices stay as their files store them (`StoredMatrix`), and can be read only. `materialise` replaces
    them by ordinary parameters.

    device: auto is CUDA if available.
    dtype: auto is float32 on a CPU and bfloat16 on CUDA (float16 before compute capability 8). With auto on a CPU, a
        GGUF file without quantized matrices keeps its own precision.
    kind: class of the model.
    weights: q8 and q4 quantize backbone and head. native rounds the quantized matrices of a GGUF file to bfloat16 if
        `dtype` is auto; float32 leaves them quantized on a CPU.
    exits: folder or Hub name of retrofitted exits for the model.
    """
    disable_progress_bar()
    path = Path(source) if source else bundled_model()
    place, of_file = resolve_device(device), is_gguf(path)
    folder = path if of_file else resolve_folder(path)
    precision = gguf_precision(folder, dtype, place, weights) if of_file else resolve_dtype(dtype, place)
    stored: dict[str, Any] = {"is_stored": True} if place.type == "cpu" and kind is Nvium else {}
    model = kind.from_pretrained(folder, dtype=precision, exits=exits, **stored).eval()
    tokenizer = load_tokenizer(folder, model)
    close_gguf()
    quantize_model(model, weights)
    if place.type != "cpu":
        check_gpu_memory(model, place)
        nn.Module.to(model, place)
    return LoadedModel(path.stem if of_file else model_name(path), model, tokenizer, folder.resolve())


def check_gpu_memory(model: Nvium, device: torch.device) -> None:
    """Raise `CheckpointError` if the weights exceed the GPU's free memory."""
    needed = sum(weight.nbytes for weight in model.parameters())
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free = torch.cuda.mem_get_info(device)[0] + unused
    if needed > free:
        raise CheckpointError(f"device {device}: the weights need {needed / 1e9:.2f} GB, {free / 1e9:.2f} GB are free")


def model_name(source: Path) -> str:
    """Return the last part of a folder or Hub name. For `model/` in a training run's folder, return the run's name."""
    path = source.resolve() if source.exists() else source
    is_runs = path.name == MODEL_FOLDER and (path.parent / RECIPE_FILE).is_file()
    return path.parent.name if is_runs else path.name


def gguf_precision(
    path: Path, dtype: Precision, device: torch.device, weights: Weights
) -> torch.dtype | Literal["auto"]:
    """Return the precision in which to load a GGUF file. Only float32 holds dequantized weights exactly."""
    if dtype != "auto" or device.type != "cpu":
        return resolve_dtype(dtype, device)
    stays_quantized = weights == "auto" and open_gguf(path).is_quantized
    return torch.float32 if stays_quantized or weights in get_args(Quantization) else "auto"


def gguf_file_tokenizer(path: Path) -> PreTrainedTokenizerFast:
    """Load the tokenizer of a GGUF file. Raise `CheckpointError` if the tokenizer is not supported or damaged."""
    file = open_gguf(path)
    try:
        tokenizer = gguf_tokenizer(file.fields.get, NAMED_ENDS)
        tokenizer.name_or_path = str(path)  # for error messages
        return tokenizer
    except TokenizerError as error:
        raise CheckpointError(f"{path}: {error}") from error
    except Exception as error:  # contradictory token lists raise various exceptions
        raise CheckpointError(f"{path}: invalid tokenizer ({type(error).__name__}: {one_line(error)})") from error


def bundled_model() -> Path:
    folders = sorted(path.parent for path in CHECKPOINTS.glob("*/config.json"))
    if len(folders) != 1:
        raise CheckpointError(f"{CHECKPOINTS}: expected one bundled model, found {len(folders)}")
    return folders[0]


def resolve_device(device: Device) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise CheckpointError("device cuda is not available: no GPU, or PyTorch was built without CUDA")
    return torch.device(device)


def resolve_dtype(dtype: Precision, device: torch.device) -> torch.dtype:
    if dtype == "auto" and device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    if dtype == "auto":
        return torch.float32
    named: torch.dtype = getattr(torch, dtype)
    return named


def load_tokenizer(source: Path, model: Nvium) -> PreTrainedTokenizerFast:
    """Load the tokenizer of a folder or GGUF file. Raise `CheckpointError` if it has more tokens than the model."""
    if is_gguf(source):
        tokenizer = gguf_file_tokenizer(source)
        highest = len(open_gguf(source).fields["tokenizer.ggml.tokens"]) - 1
    else:
        tokenizer = folder_tokenizer(source)
        highest = max([*tokenizer.get_vocab().values(), *tokenizer("").input_ids])
    if highest >= model.config.vocab_size:
        raise CheckpointError(
            f"{source}: the tokenizer has the token id {highest}, but the model's vocab_size is "
            f"{model.config.vocab_size}"
        )
    return tokenizer


def source_tokenizer(source: str) -> PreTrainedTokenizerFast:
    """Load only the tokenizer of a folder, Hub name or GGUF file."""
    path = Path(source)
    return gguf_file_tokenizer(path) if is_gguf(path) else folder_tokenizer(resolve_folder(path))
