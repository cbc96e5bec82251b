"""The text of an answer while it is streamed: never part of a character or of a stop string.

The joined text does not depend on how it is split into chunks. `TokenBytes` has the bytes and names of single tokens.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.decoders import ByteLevel, DecodeStream

from nvium_core.choices import FinishReason
from nvium_core.text.gguf_tokenizer import SPACE

REPLACEMENT = "\ufffd"
"""The decoder's replacement for bytes that are not UTF-8, such as part of a character."""

CONTEXT_TOKENS = 8
"""Number of last prompt tokens to decode first. The text of the first generated token may depend on them."""

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
"""The characters of byte-level tokens: a printable byte is itself, and the other bytes follow after `ÿ`."""

PRINTABLE = {ord(character) for character in ALPHABET if ord(character) < 256}
BYTE_OF = dict(zip(ALPHABET, [*sorted(PRINTABLE), *sorted({*range(256)} - PRINTABLE)], strict=True))

BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")  # a byte's name in a vocabulary with byte fallback


class Detokenizer:
    """Emits text as soon as its characters are complete. Special tokens have no text."""

    def __init__(self, tokenizer: Tokenizer, preceding: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._held: list[int] = []
        for token_id in preceding[-CONTEXT_TOKENS:]:
            self.push(token_id)

    def push(self, token_id: int) -> str:
        self._held.append(token_id)
        text = self._stream.step(self._tokenizer, token_id)
        if text is None:
            return ""
        self._held.clear()
        return text

    def flush(self) -> str:
        """Return the remaining text. Drop an incomplete character at its end."""
        text: str = self._tokenizer.decode(self._held, skip_special_tokens=True)
        self._held.clear()
        return text.rstrip(REPLACEMENT)


@dataclass
class StopStrings:
    """Passes text through until the first stop string. Buffers only text that may begin a stop string."""

    stops: Sequence[str]
    include: bool = False
    matched: str | None = None
    _held: str = field(default="", init=False)

    def push(self, text: str) -> str:
        """Add text and return the text that can be emitted. After a match, return nothing."""
        if not self.stops:
            return text
        if self.matched is not None:
            return ""
        text = self._held + text
        if found := [(start + len(stop), start) for stop in self.stops if (start := text.find(stop)) >= 0]:
            end, start = min(found)
            self.matched, self._held = text[start:end], ""
            return text[: end if self.include else start]
        certain = certain_length(text, self.stops)
        self._held = text[certain:]
        return text[:certain]

    def flush(self) -> str:
        text, self._held = self._held, ""
        return text


def certain_length(text: str, marks: Sequence[str]) -> int:
    """Return the length of the prefix that cannot be part of a mark, if the text goes on."""
    longest = max(map(len, marks), default=0)
    candidates = range(max(0, len(text) - longest + 1), len(text))
    return next((i for i in candidates if any(mark.startswith(text[i:]) for mark in marks)), len(text))


@dataclass
class AnswerText:
    """Turns the tokens of one answer into text, and buffers text that may have to be cut.

    Stop strings in the text of the first `min_tokens` tokens are ignored.
    """

    detokenizer: Detokenizer
    stops: StopStrings
    min_tokens: int = 0
    num_tokens: int = field(default=0, init=False)
    num_characters: int = field(default=0, init=False)
    """Number of characters so far, including buffered and cut ones."""
    finish_reason: FinishReason | None = field(default=None, init=False)
    """Why the answer ended: as its last token says, or `stop` after a stop string."""

    def push(self, token_id: int, *, is_stop: bool, finish_reason: FinishReason | None) -> str:
        """Add a token and return the text that can be emitted.

        A stop token has text only if stop strings are included. After the last token, all buffered text is emitted.
        """
        text = "" if is_stop and not self.stops.include else self.detokenizer.push(token_id)
        self.finish_reason = finish_reason
        if finish_reason:
            text += self.detokenizer.flush()
        self.num_characters += len(text)
        self.num_tokens += 1
        if self.num_tokens <= self.min_tokens:
            return text
        certain = self.stops.push(text)
        if self.stops.matched is not None:
            self.finish_reason = "stop"
        return certain + self.stops.flush() if finish_reason else certain

    def end(self) -> str:
        """Return the buffered text of an answer that ends without a further token."""
        return self.stops.push(self.detokenizer.flush()) + self.stops.flush()


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
