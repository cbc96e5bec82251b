"""Write a Llama with the shape of Llama 3.2 1B and random bfloat16 weights, to measure speed and memory.

    python -m research.random_folder FOLDER

`--gguf` also writes FOLDER.gguf for llama.cpp. `--tokenizer` is a model folder or GGUF file with the tokenizer to use.
The default is the bundled model's tokenizer.
"""

import argparse
from pathlib import Path
from typing import Any

import torch

from nvium_core.bench.contenders.gguf_file import write_gguf
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
def write(tokenizer_source: str, folder: Path, *, num_layers: int, has_gguf: bool) -> None:
    tokenizer = source_tokenizer(tokenizer_source)
    shape = LLAMA_3_2_1B | {"num_hidden_layers": num_layers}
    config = NviumConfig(**shape, bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id)
    with torch.device("meta"):
        model = NviumForCausalLM(config)
    model = model.bfloat16().to_empty(device="cpu")
    model.tie_weights()
    drawn = (0.02 * torch.randn(PATTERN, generator=torch.Generator().manual_seed(0))).bfloat16()
    for name, weight in model.named_parameters():
        numbers = weight.view(-1)
        for part in numbers.split(PATTERN):
            part.copy_(torch.ones_like(part) if "norm" in name else drawn[: len(part)])
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if has_gguf:
        write_gguf(model, folder.with_suffix(".gguf"), "bf16")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokenizer", default=str(bundled_model()))
    parser.add_argument("--layers", type=int, default=LLAMA_3_2_1B["num_hidden_layers"])
    parser.add_argument("--gguf", action="store_true")
    args = parser.parse_args()
    write(args.tokenizer, args.folder, num_layers=args.layers, has_gguf=args.gguf)


if __name__ == "__main__":
    main()
