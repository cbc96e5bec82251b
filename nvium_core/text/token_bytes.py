"""The bytes and printable names of a vocabulary's tokens."""

from collections.abc import Callable

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel


class TokenBytes:
    """Maps token ids to bytes. Unlike decoding a single token, it keeps leading spaces and parts of characters."""

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        self._bytes_of = bytes_of
        self._names: dict[int, str] = {}

    def __getitem__(self, token_id: int) -> bytes:
        return self._bytes_of(token_id)

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
