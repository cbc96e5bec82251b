"""Random Hugging Face Llamas and their folders, for tests against transformers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

LLAMA_3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}

SHAPE: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}


def random_llama(seed: int = 0, **fields: Any) -> LlamaForCausalLM:
    """Build a small float32 Llama with weights so large that its output differs between positions."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**(SHAPE | fields))).eval()


def llama_folder(folder: Path, llama: LlamaForCausalLM) -> Path:
    llama.save_pretrained(folder)
    return folder


def edit_tensors(folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
