"""A random model whose tokens are the 256 bytes and `<|endoftext|>`, with the tokenizer to match."""

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from nvium_core import LoadedModel
from tests.random_models import random_model

END_OF_TEXT = "<|endoftext|>"
NAME = "bytes"
EXIT_LAYERS = [1, 2, 4]


def byte_symbols() -> list[str]:
    """The character that stands for each byte in a byte-level vocabulary, byte 0 first."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def byte_level_tokenizer(pieces: Iterable[bytes]) -> Tokenizer:
    """Id 0 is end-of-text, the others decode to these pieces in turn."""
    symbols = byte_symbols()
    vocabulary = {"".join(symbols[byte] for byte in piece): number for number, piece in enumerate(pieces, start=1)}
    tokenizer = Tokenizer(models.BPE({END_OF_TEXT: 0, **vocabulary}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END_OF_TEXT])
    return tokenizer


def byte_tokenizer() -> Tokenizer:
    return byte_level_tokenizer(bytes([byte]) for byte in range(256))


def token_ids(text: str) -> list[int]:
    return [byte + 1 for byte in text.encode()]


def load_byte_model(context: int = 4096) -> LoadedModel:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer(), eos_token=END_OF_TEXT)
    return LoadedModel(NAME, random_model(EXIT_LAYERS, vocab_size=257, context=context), tokenizer)
