"""Loads a model for the CPU with memory-mapped weights, whose pages the system can reclaim.

Native calls have their own copy of the weights, so PyTorch's copy should not take memory. Weights that are dequantized,
quantized or converted to another precision cannot be mapped from the model's files. These weights are written once to a
model folder in the user's cache. Later starts and other replicas map this folder too.
"""

import ctypes
import hashlib
import logging
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import cast

from filelock import FileLock
from platformdirs import user_cache_path
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.utils import GENERATION_CONFIG_NAME
from transformers.utils.logging import disable_progress_bar

from nvium_core import checksums
from nvium_core.choices import Device, Precision, Weights
from nvium_core.conversion import atomic_folder, write_config
from nvium_core.errors import NviumError
from nvium_core.loading import LoadedModel, load_model, load_tokenizer, model_name, resolve_device
from nvium_core.model.checkpoint import PUBLISHED_EXTRAS, resolve_folder
from nvium_core.model.exits_file import exits_folder
from nvium_core.model.nvium import Nvium
from nvium_core.model.quantized import GroupKind, Groups, attach_groups, groups_of
from nvium_core.model.source import gguf_parts, is_gguf

logger = logging.getLogger(__name__)

VERSION = 4  # format of cached folders, a part of their path

WEIGHTS_FILE, GROUPS_FILE = "model.safetensors", "groups.safetensors"

MIN_BYTES = 64 * 2**20  # smaller models are not cached
MAX_SHARE = 0.25  # maximum share of the free disk space that one model may take

MAX_IDLE_DAYS = 30
"""Days without use after which a cached model is removed, as soon as another model is written to the cache."""


def load_mapped(
    source: str | None = None,
    device: Device = "auto",
    dtype: Precision = "auto",
    weights: Weights = "auto",
    exits: str | None = None,
) -> LoadedModel:
    """Load a model like `load_model`, but map its weights if it is on a CPU.

    If the cache cannot be written, log the reason and keep the weights in memory.
    """
    if source is None or resolve_device(device).type != "cpu":
        return load_model(source, device, dtype, weights=weights, exits=exits)
    disable_progress_bar()
    path = Path(source)
    origin = path if is_gguf(path) else resolve_folder(path)
    name = path.stem if is_gguf(path) else model_name(path)
    added = exits_folder(exits) if exits else None
    place = cache_folder(origin, dtype, weights, added)
    loaded = read_cached(place, origin) or write_cached(
        load_model(str(origin), device, dtype, weights=weights, exits=str(added) if added else None), origin, place
    )
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # return freed memory, which glibc would keep
    if trim:
        trim(0)
    return replace(loaded, name=name, folder=origin.resolve())


def cache_folder(origin: Path, dtype: Precision, weights: Weights, exits: Path | None = None) -> Path:
    """Return the model's folder in the user's cache. Its path depends on the model's files, options and `VERSION`."""
    files = [*gguf_parts(origin)] if origin.is_file() else [*sorted(origin.iterdir()), origin / PUBLISHED_EXTRAS]
    files += sorted(exits.iterdir()) if exits else []
    written = [(file.name, file.stat().st_mtime_ns, file.stat().st_size) for file in files if file.is_file()]
    own = f"{origin.resolve().name}-{digest(str(origin.resolve()))}"
    return user_cache_path("nvium") / "weights" / own / f"{dtype}-{weights}-{digest(repr((VERSION, written)))}"


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def write_cached(loaded: LoadedModel, origin: Path, place: Path) -> LoadedModel:
    """Write the model to the cache and return it mapped from there.

    Return `loaded` itself if it is small, if most of its weights are already mapped, or if the cache cannot be written.
    """
    num_bytes = sum(weight.nbytes for weight in loaded.model.parameters())
    if unmapped_bytes(loaded.model) < max(MIN_BYTES, num_bytes / 2):
        return loaded
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(place.with_suffix(".lock")):
            if not place.exists():
                free = shutil.disk_usage(place.parent).free
                if num_bytes > MAX_SHARE * free:
                    raise OSError(f"{num_bytes:,} bytes exceed {MAX_SHARE:.0%} of the free space in {place.parent}")
                remove_outdated(place)
                write(loaded, origin, place)
        logger.info("%s: weights are memory-mapped from %s", loaded.name, place)
        return read_cached(place, origin) or loaded
    except (OSError, NviumError) as error:
        logger.info("%s: cannot cache the weights, so they stay in memory: %s", loaded.name, error)
        return loaded


def unmapped_bytes(model: nn.Module) -> int:
    """Return the bytes of weights that are not mapped from a file. Return 0 if the system has no /proc/self/maps."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return 0
    lines = (line.split(maxsplit=5) for line in maps.read_text(encoding="utf-8", errors="replace").splitlines())
    files = [tuple(int(end, 16) for end in fields[0].split("-")) for fields in lines if fields[4] != "0"]
    weights = list(model.parameters())
    return sum(weight.nbytes for weight in weights if not any(first <= weight.data_ptr() < end for first, end in files))


def remove_outdated(place: Path) -> None:
    """Remove earlier versions of this model, and models that were not used for `MAX_IDLE_DAYS`."""
    options = place.name.rpartition("-")[0]
    oldest = time.time() - MAX_IDLE_DAYS * 24 * 3600
    for folder in place.parent.parent.glob("*/*-*"):
        is_earlier = folder.parent == place.parent and folder.name.startswith(f"{options}-")
        if folder.is_dir() and (is_earlier or folder.stat().st_mtime < oldest):
            shutil.rmtree(folder, ignore_errors=True)


def write(loaded: LoadedModel, origin: Path, place: Path) -> None:
    """Write a model folder. The groups of quantized layers are in a separate file."""
    model = loaded.model
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    with atomic_folder(place) as folder:
        write_config(model.config, model.dtype, folder)
        save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
        write_groups(model, folder)
        if is_gguf(origin):
            loaded.tokenizer.save_pretrained(folder)
            if loaded.model.generation_config:
                loaded.model.generation_config.save_pretrained(folder)
        elif (origin / GENERATION_CONFIG_NAME).exists():
            shutil.copyfile(origin / GENERATION_CONFIG_NAME, folder / GENERATION_CONFIG_NAME)
        checksums.seal(folder)


def write_groups(model: Nvium, folder: Path) -> None:
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    held = {name: groups for name, layer in layers if (groups := groups_of(layer))}
    if held:
        tensors: dict[str, Tensor] = {f"{name}.numbers": groups.numbers_ND for name, groups in held.items()}
        tensors |= {f"{name}.scales": groups.scales_NG for name, groups in held.items()}
        tensors |= {f"{name}.minima": groups.minima_NG for name, groups in held.items() if groups.minima_NG is not None}
        save_file(tensors, folder / GROUPS_FILE, metadata={name: groups.kind for name, groups in held.items()})


def read_cached(place: Path, origin: Path) -> LoadedModel | None:
    """Load a cached model. Return None if it is missing or damaged. Remove a damaged model."""
    if not place.exists():
        return None
    try:
        checksums.check(place)
        model = Nvium.from_pretrained(place, dtype="auto").eval()
        read_groups(model, place)
        loaded = LoadedModel(place.name, model, load_tokenizer(place if is_gguf(origin) else origin, model))
        os.utime(place)
    except (NviumError, SafetensorError, OSError, KeyError) as error:
        logger.warning("%s: the cached model is damaged and will be written again: %s", place, error)
        shutil.rmtree(place, ignore_errors=True)
        return None
    return loaded


def read_groups(model: Nvium, folder: Path) -> None:
    if not (folder / GROUPS_FILE).exists():
        return
    with safe_open(folder / GROUPS_FILE, "pt") as file:
        stored = set(file.keys())
        for name, kind in file.metadata().items():
            numbers, scales = file.get_tensor(f"{name}.numbers"), file.get_tensor(f"{name}.scales")
            minima = file.get_tensor(f"{name}.minima") if f"{name}.minima" in stored else None
            groups = Groups(cast(GroupKind, kind), numbers, scales, minima)
            attach_groups(cast(nn.Linear, model.get_submodule(name)), groups)
