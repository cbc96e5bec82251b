"""The bytes and printable names of a vocabulary's tokens."""

import re

from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.decoders import ByteLevel

from nvium_core.text.gguf_tokenizer import SPACE

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
"""The characters of byte-level tokens: a printable byte is itself, and the other bytes follow after `ÿ`."""

PRINTABLE = {ord(character) for character in ALPHABET if ord(character) < 256}
BYTE_OF = dict(zip(ALPHABET, [*sorted(PRINTABLE), *sorted({*range(256)} - PRINTABLE)], strict=True))

BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")  # a byte's name in a vocabulary with byte fallback


class TokenBytes:
    """Maps token ids to bytes. Unlike decoding a single token, it keeps leading spaces and parts of characters.

    The bytes of a special token are its name. An id without a token has no bytes.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        decoder = repr(tokenizer.decoder)
        self.is_byte_level, self.has_byte_fallback = "ByteLevel(" in decoder, "ByteFallback(" in decoder
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._special = {token_id for token_id, token in added.items() if token.special}
        self._names: dict[int, str] = {}

    def __getitem__(self, token_id: int) -> bytes:
        name = self._tokenizer.id_to_token(token_id)
        if name is None or token_id in self._special:
            return (name or "").encode()
        if self.is_byte_level:
            return bytes(BYTE_OF[character] for character in name) if BYTE_OF.keys() >= set(name) else name.encode()
        if not self.has_byte_fallback:
            return self._tokenizer.decode([token_id]).encode()
        byte = BYTE.fullmatch(name)
        return bytes.fromhex(byte[1]) if byte else name.replace(SPACE, " ").encode()

    def name(self, token_id: int) -> str:
        """Return the token's text, or `bytes:` and its bytes in hexadecimal if they are not valid UTF-8."""
        if token_id not in self._names:
            try:
                name = self[token_id].decode()
            except UnicodeDecodeError:
                name = "bytes:" + "".join(f"\\x{byte:02x}" for byte in self[token_id])
            self._names[token_id] = name
        return self._names[token_id]


def longest_token(tokenizer: Tokenizer) -> int | None:
    """Return the number of characters of the longest token. Return None if tokenization may drop characters."""
    added = tokenizer.get_added_tokens_decoder().values()
    is_lossless = isinstance(tokenizer.decoder, ByteLevel) and tokenizer.normalizer is None
    if not is_lossless or any(token.lstrip or token.rstrip for token in added):
        return None
    return max(map(len, tokenizer.get_vocab()))
