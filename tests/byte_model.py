"""A random model whose tokens are the 256 bytes and `<|endoftext|>`, with its tokenizer."""

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from nvium_core import LoadedModel
from tests.random_models import random_model

END_OF_TEXT = "<|endoftext|>"
TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}" + END_OF_TEXT + "{% endfor %}<assistant>"
"""A chat template."""

NAME = "bytes"
EXIT_LAYERS = [1, 2, 4]


def byte_symbols() -> list[str]:
    """Return the character of each byte in a byte-level vocabulary, byte 0 first."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def byte_level_tokenizer(pieces: Iterable[bytes]) -> Tokenizer:
    """Build a tokenizer whose id 0 is end-of-text; ids from 1 on decode to `pieces`."""
    symbols = byte_symbols()
    vocabulary = {"".join(symbols[byte] for byte in piece): number for number, piece in enumerate(pieces, start=1)}
    tokenizer = Tokenizer(models.BPE({END_OF_TEXT: 0, **vocabulary}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END_OF_TEXT])
    return tokenizer


def byte_tokenizer() -> Tokenizer:
    return byte_level_tokenizer(bytes([byte]) for byte in range(256))


def wrapped_tokenizer(chat_template: str | None = None) -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer(), eos_token=END_OF_TEXT)
    tokenizer.chat_template = chat_template
    return tokenizer


def token_ids(text: str) -> list[int]:
    return [byte + 1 for byte in text.encode()]


def load_byte_model(context: int = 4096) -> LoadedModel:
    return LoadedModel(NAME, random_model(EXIT_LAYERS, vocab_size=257, context=context), wrapped_tokenizer())


def save_byte_model(folder: Path, context: int = 4096) -> Path:
    loaded = load_byte_model(context)
    loaded.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    return folder
