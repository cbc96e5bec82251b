"""Write a model with random bfloat16 weights, to measure speed and memory.

    python -m research.random_folder FOLDER [--shape ouro-1.4b]

The default is a Llama with the shape of Llama 3.2 1B. `ouro-1.4b` is an Ouro in its published layout. `--layers` makes
either small. `--gguf` also writes the Llama as FOLDER.gguf for llama.cpp. `--tokenizer` is a model folder or GGUF file
with the tokenizer to use; the default is the bundled model's.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from nvium_core.bench.contenders.gguf_file import write_gguf
from nvium_core.bench.shapes import PUBLISHED
from nvium_core.loading import bundled_model, source_tokenizer
from nvium_core.model.causal_lm import NviumForCausalLM
from nvium_core.model.config import NviumConfig

LLAMA_3_2_1B: dict[str, Any] = {
    "vocab_size": 128_256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "adapter_hidden_size": 0,
}

PATTERN = 2**22
"""Number of distinct random values. They are repeated, because drawing a billion values takes minutes."""


@torch.no_grad()
def write_llama(tokenizer_source: str, folder: Path, shape: dict[str, Any], *, has_gguf: bool) -> None:
    tokenizer = source_tokenizer(tokenizer_source)
    config = NviumConfig(**shape, bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id)
    with torch.device("meta"):
        model = NviumForCausalLM(config)
    model = model.bfloat16().to_empty(device="cpu")
    model.tie_weights()
    fill(dict(model.named_parameters()))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if has_gguf:
        write_gguf(model, folder.with_suffix(".gguf"), "bf16")


def write_ouro(tokenizer_source: str, folder: Path, config: dict[str, Any]) -> None:
    tokenizer = source_tokenizer(tokenizer_source)
    shapes = ouro_shapes(config)
    tensors = {name: torch.empty(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    fill(tensors)
    tensors["model.early_exit_gate.bias"].zero_()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    more = {"architectures": ["OuroForCausalLM"], "eos_token_id": tokenizer.eos_token_id, "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config | more, indent=1), encoding="utf-8")
    tokenizer.save_pretrained(folder)


def ouro_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of an Ouro's tensors by their published names."""
    width, inner, vocab = (config[name] for name in ("hidden_size", "intermediate_size", "vocab_size"))
    queries, keys = (config["head_dim"] * config[f"num_{kind}_heads"] for kind in ("attention", "key_value"))
    layer: dict[str, tuple[int, ...]] = {"self_attn.q_proj": (queries, width), "self_attn.o_proj": (width, queries)}
    layer |= {"self_attn.k_proj": (keys, width), "self_attn.v_proj": (keys, width)}
    layer |= {"mlp.gate_proj": (inner, width), "mlp.up_proj": (inner, width), "mlp.down_proj": (width, inner)}
    norms = "input_layernorm", "input_layernorm_2", "post_attention_layernorm", "post_attention_layernorm_2"
    layer |= dict.fromkeys(norms, (width,))
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (vocab, width), "lm_head": (vocab, width)}
    shapes |= {"model.norm": (width,), "model.early_exit_gate": (1, width)}
    for number in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{number}.{part}": shape for part, shape in layer.items()}
    return {f"{name}.weight": shape for name, shape in shapes.items()} | {"model.early_exit_gate.bias": (1,)}


def fill(tensors: Mapping[str, Tensor]) -> None:
    """Set norms to 1. Fill other tensors from the same random numbers."""
    drawn = (0.02 * torch.randn(PATTERN, generator=torch.Generator().manual_seed(0))).bfloat16()
    for name, tensor in tensors.items():
        for part in tensor.view(-1).split(PATTERN):
            part.copy_(torch.ones_like(part) if "norm" in name else drawn[: len(part)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokenizer", default=str(bundled_model()))
    parser.add_argument("--shape", choices=["llama-1b", *PUBLISHED], default="llama-1b")
    parser.add_argument("--layers", type=int, help="number of layers [the shape's]")
    parser.add_argument("--gguf", action="store_true")
    args = parser.parse_args()
    changes = {"num_hidden_layers": args.layers} if args.layers else {}
    if args.shape in PUBLISHED:
        write_ouro(args.tokenizer, args.folder, PUBLISHED[args.shape] | changes)
    else:
        write_llama(args.tokenizer, args.folder, LLAMA_3_2_1B | changes, has_gguf=args.gguf)


if __name__ == "__main__":
    main()
