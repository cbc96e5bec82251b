"""The bytes that each token of a vocabulary stands for, and a name for it that is text."""

from llguidance import LLTokenizer


class TokenBytes:
    """Unlike decoding token by token, this keeps leading spaces and parts of characters."""

    def __init__(self, tokenizer: LLTokenizer) -> None:
        self._tokenizer = tokenizer

    def __getitem__(self, token_id: int) -> bytes:
        return self._tokenizer.decode_bytes([token_id])

    def name(self, token_id: int) -> str:
        """The token's text, or `bytes:` and its bytes in hexadecimal if they are no whole characters."""
        piece = self[token_id]
        try:
            return piece.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)
