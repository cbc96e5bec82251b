"""Target: GGUF files with arbitrary bytes are loaded, or refused with the file's name."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import gguf
import numpy as np
import torch

from nvium_core import CheckpointError, NviumForCausalLM
from nvium_core.loading import gguf_file_tokenizer
from nvium_core.model.nvium import Nvium
from tests.byte_model import byte_symbols
from tests.fuzzing.targets.checkpoint import SHARED_MEMORY
from tests.model.gguf_files import close, write_gguf
from tests.model.test_backbones import random_model

SHAPE = {"vocab_size": 3, "hidden_size": 4, "intermediate_size": 4, "head_dim": 4, "max_position_embeddings": 8}
SHAPE |= {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}


def seeds() -> Iterator[bytes]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "seed.gguf"
        for make in ("llama", "qwen2", "qwen3"):
            yield write_gguf(path, random_model(make, SHAPE)).read_bytes()
        for kind in ("gpt2", "llama"):
            write_tokenizer(path, kind)
            yield path.read_bytes()


def write_tokenizer(path: Path, kind: str) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(kind)
    tokens = ["<s>", "</s>", "<0x0A>", *byte_symbols()[97:101], "ab"]
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 6, *[1] * 5])
    writer.add_eos_token_id(1)
    if kind == "gpt2":
        writer.add_tokenizer_pre("llama-bpe")
        writer.add_token_merges(["a b"])
    else:
        writer.add_token_scores([0.0] * len(tokens))
        writer.add_bos_token_id(0)
    writer.add_chat_template("{{ messages }}")
    writer.add_tensor("token_embd.weight", np.zeros((8, 4), np.float32))
    close(writer)


def target() -> Callable[[bytes], None]:
    path = Path(tempfile.mkdtemp(dir=SHARED_MEMORY)) / "fuzzed.gguf"

    def check(data: bytes) -> None:
        path.write_bytes(data)
        with suppress(CheckpointError):
            Nvium.from_pretrained(path, dtype=torch.float32, is_stored=True)
            NviumForCausalLM.from_pretrained(path, dtype=torch.float32)
        try:
            tokenizer = gguf_file_tokenizer(path)
        except CheckpointError as error:
            if str(path) not in str(error):
                raise
        else:
            tokenizer.decode(tokenizer.encode("ab c"))

    return check
