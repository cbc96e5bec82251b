"""The bytes of each token of a vocabulary, and a printable name."""

from collections.abc import Callable

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel


class TokenBytes:
    """Keeps leading spaces and partial characters, which decoding token by token loses."""

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        self._bytes_of = bytes_of
        self._names: dict[int, str] = {}

    def __getitem__(self, token_id: int) -> bytes:
        return self._bytes_of(token_id)

    def name(self, token_id: int) -> str:
        """The token's text, or `bytes:` and hexadecimal if its bytes are not whole characters."""
        if token_id not in self._names:
            self._names[token_id] = name_of(self[token_id])
        return self._names[token_id]


def longest_token(tokenizer: Tokenizer) -> int | None:
    """Characters of the longest token; None if tokenization may drop part of a text."""
    added = tokenizer.get_added_tokens_decoder().values()
    takes_all = isinstance(tokenizer.decoder, ByteLevel) and tokenizer.normalizer is None
    if not takes_all or any(token.lstrip or token.rstrip for token in added):
        return None
    return max(map(len, tokenizer.get_vocab()))


def name_of(piece: bytes) -> str:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)
