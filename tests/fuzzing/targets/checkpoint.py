"""Target: model folders and training checkpoints with arbitrary bytes are loaded, or refused with the file's name."""

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from nvium_core import CheckpointError, NviumForCausalLM
from nvium_core.model.nvium import Nvium
from nvium_core.training.checkpoint import PARTS, STATE, read_state
from nvium_core.training.errors import TrainingError
from tests.random_models import random_model

FILES = ("config.json", "model.safetensors", "model.safetensors.index.json", "generation_config.json", STATE)
SHARED_MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
MAKES = ("llama", "mistral", "qwen2", "qwen3", "smollm3")


def seeds() -> Iterator[bytes]:
    files = model_files()
    configs = [json.loads(files["config.json"])]
    plain = {name: value for name, value in configs[0].items() if "exit" not in name and "router" not in name}
    configs += [plain | {"model_type": make, "architectures": ["X"]} for make in MAKES]
    yield from (bytes([0]) + json.dumps(config, separators=(",", ":")).encode() for config in configs)
    yield bytes([1]) + files["model.safetensors"]
    yield bytes([1]) + save({"a": torch.zeros(2, 2), "b": torch.ones(3, dtype=torch.bfloat16)})
    yield bytes([2]) + b'{"weight_map": {"a": "model.safetensors", "b": "../x", "c": 5}}'
    yield bytes([3]) + b'{"eos_token_id": [0, 3], "bos_token_id": 1, "temperature": 0.5, "max_length": 20}'
    yield from (bytes([4]) + state for state in run_states())


def model_files() -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as folder:
        shape = {"vocab_size": 5, "width": 8, "num_heads": 2, "num_key_heads": 1}
        random_model([1, 2], dtype=torch.float32, **shape).save_pretrained(folder)
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def run_states() -> Iterator[bytes]:
    state: dict[str, Any] = dict.fromkeys(PARTS, 0) | {"model": {"a": torch.zeros(2)}, "optimizers": {"b": [1.0, "x"]}}
    with tempfile.TemporaryDirectory() as folder:
        for number, written in enumerate((state, {"model": 1})):
            path = Path(folder) / str(number)
            torch.save(written, path)
            yield path.read_bytes()


def target() -> Callable[[bytes], None]:
    folder = Path(tempfile.mkdtemp(dir=SHARED_MEMORY))
    files = model_files()

    def check(data: bytes) -> None:
        name, content = FILES[data[0] % len(FILES) if data else 0], data[1:]
        shutil.rmtree(folder)
        folder.mkdir()
        if name == STATE:
            check_state(folder, content)
            return
        for file, intact in files.items():
            (folder / file).write_bytes(intact)
        (folder / name).write_bytes(content)
        try:
            Nvium.from_pretrained(folder, is_stored=True)
            NviumForCausalLM.from_pretrained(folder)
        except CheckpointError as error:
            if str(folder) not in str(error):
                raise

    return check


def check_state(folder: Path, content: bytes) -> None:
    (folder / STATE).write_bytes(content)
    with suppress(TrainingError):
        state = read_state(folder)
        assert state is not None
        assert state.keys() >= PARTS
