"""Looped models: the fixtures with what a public implementation computes, and random folders in their formats."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from nvium_core.bench.shapes import OURO_1_4B
from research.random_folder import ouro_shapes
from tests.model.llama_folders import edit_tensors

FIXTURES = Path(__file__).parents[3] / "shared" / "fixtures" / "looped"
OURO, NANBEIGE = ("ouro-4x3", "ouro-2x2-gqa"), ("nanbeige-2x3", "nanbeige-3x2-skip-norm")

OURO_CONFIG: dict[str, Any] = OURO_1_4B | {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "total_ut_steps": 3,
    "eos_token_id": 0,
}


def expected_of(name: str) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((FIXTURES / name / "expected.json").read_text(encoding="utf-8"))
    return values


def ouro_folder(folder: Path, **changes: Any) -> Path:
    """Write an Ouro with random weights. A change of None removes the field."""
    config = {name: value for name, value in (OURO_CONFIG | changes).items() if value is not None}
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in ouro_shapes(config).items()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def without(folder: Path, name: str) -> Path:
    edit_tensors(folder, lambda tensors: tensors.pop(name))
    return folder


def resized(folder: Path, name: str, *shape: int) -> Path:
    edit_tensors(folder, lambda tensors: tensors.update({name: torch.zeros(shape)}))
    return folder
