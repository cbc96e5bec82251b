"""Builds a fast tokenizer from a GGUF file, with its chat template.

It tokenizes like llama.cpp. `tokenizer.ggml.pre` names the pre-tokenizer; names and patterns are from llama.cpp
(src/llama-vocab.cpp).
"""

import logging
from collections.abc import Callable, Container
from itertools import zip_longest
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import PreTokenizer
from transformers import PreTrainedTokenizerFast

from nvium_core.errors import NviumError
from nvium_core.text.frame import set_frame

logger = logging.getLogger(__name__)

Fields = Callable[[str], Any]
"""Metadata field's name → its value, or None if it is missing."""

CONTROL, USER_DEFINED = 3, 4
"""Values of `tokenizer.ggml.token_type`: special tokens, and other tokens that are matched before pre-tokenization."""

MAX_PIECE = 512
"""Maximum characters of a SentencePiece token. Every split of a token may be a merge, so long ones cost time."""

SPACE = "▁"
CONTRACTIONS = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER_THEN_LOWER = r"[^\r\n\p{L}\p{N}]?((?=[\p{L}])([^a-z]))*((?=[\p{L}])([^A-Z]))+"
UPPER = r"[^\r\n\p{L}\p{N}]?((?=[\p{L}])([^a-z]))+((?=[\p{L}])([^A-Z]))*"


class TokenizerError(NviumError, ValueError):
    """The tokenizer is not supported."""


class Uncopied(NamedTuple):
    """A tokenizer that transformers need not copy. Of 128,256 tokens, a copy takes 0.4 s."""

    tokenizer: Tokenizer

    def __deepcopy__(self, memo: object) -> Tokenizer:
        return self.tokenizer


def split(*patterns: str) -> list[PreTokenizer]:
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    return [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]


GPT_2: list[PreTokenizer] = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
SINGLE_DIGITS: list[PreTokenizer] = [pre_tokenizers.Digits(individual_digits=True), *GPT_2]
LLAMA_3 = split(rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}{REST}")
QWEN_2 = split(rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{REST}")
TEKKEN = split(rf"{UPPER_THEN_LOWER}|{UPPER}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
GPT_2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
DEFAULT = split(r"[\p{P}$+<=>^~|]+", GPT_2_WORDS, r"\p{N}+", "[0-9][0-9][0-9]")

WHOLE_PIECES = ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "tekken")
"""Pre-tokenizers with which a piece that is in the vocabulary becomes one token. With these, a text begins with BOS."""

PIECES = {"default": DEFAULT, "gpt-2": GPT_2, "tekken": TEKKEN}
PIECES |= dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "minerva-7b"), SINGLE_DIGITS)
PIECES |= dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "smaug-bpe"), LLAMA_3)
PIECES |= dict.fromkeys(("qwen2", "megrez", "deepseek-r1-qwen"), QWEN_2)


def gguf_tokenizer(field: Fields, control: Container[str] = ()) -> PreTrainedTokenizerFast:
    """Build the tokenizer. Raise `TokenizerError` if it is not supported.

    control: tokens that are special even if the file has another type for them.
    """
    kinds = {"gpt2": byte_level, "llama": sentence_piece}
    kind = field("tokenizer.ggml.model")
    if kind not in kinds:
        raise TokenizerError(f"tokenizer {kind!r} is not supported; supported: {', '.join(kinds)}")
    if not field("tokenizer.ggml.tokens"):
        raise TokenizerError("tokenizer.ggml.tokens is missing or empty")
    tokenizer = kinds[kind](field)
    tokens, types = field("tokenizer.ggml.tokens"), field("tokenizer.ggml.token_type") or []
    for token, kind_of in zip_longest(tokens, types):
        if token in control or kind_of in (CONTROL, USER_DEFINED):
            is_special = token in control or kind_of == CONTROL
            tokenizer.add_tokens([AddedToken(token, special=is_special, normalized=False)])
    named = {name: field(f"tokenizer.ggml.{theirs}_token_id") for name, theirs in NAMED.items()}
    for name, token in named.items():
        if token is not None and not 0 <= token < len(tokens):
            raise TokenizerError(f"tokenizer.ggml.{NAMED[name]}_token_id must be in [0, {len(tokens)}), got {token}")
    special = {f"{name}_token": tokens[token] for name, token in named.items() if token is not None}
    adds = {"bos": begins_with_bos(field, kind), "eos": field("tokenizer.ggml.add_eos_token")}
    set_frame(tokenizer, *([named[name]] if adds[name] and named[name] is not None else [] for name in adds))
    made = PreTrainedTokenizerFast(tokenizer_object=Uncopied(tokenizer), clean_up_tokenization_spaces=False, **special)
    made.chat_template = chat_templates(field)
    return made


NAMED = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}


def chat_templates(field: Fields) -> str | dict[str, str] | None:
    """Return the file's chat template. If the file has several, return name → template."""
    default: str | None = field("tokenizer.chat_template")
    others = {name: field(f"tokenizer.chat_template.{name}") for name in field("tokenizer.chat_templates") or ()}
    return {**({"default": default} if default else {}), **others} if others else default


def begins_with_bos(field: Fields, kind: str) -> bool:
    adds_bos = field("tokenizer.ggml.add_bos_token")
    if adds_bos is None:
        return kind == "llama" or field("tokenizer.ggml.pre") in WHOLE_PIECES
    return bool(adds_bos)


def byte_level(field: Fields) -> Tokenizer:
    pre = field("tokenizer.ggml.pre")
    if not pre:
        logger.warning("the file has no tokenizer.ggml.pre: using the default pre-tokenizer, which may hurt quality")
        pre = "default"
    if pre not in PIECES:
        raise TokenizerError(f"tokenizer.ggml.pre {pre!r} is not supported; supported: {', '.join(PIECES)}")
    merges = [tuple(merge.split(" ", 1)) for merge in field("tokenizer.ggml.merges") or ()]
    vocabulary = {token: index for index, token in enumerate(field("tokenizer.ggml.tokens"))}
    tokenizer = Tokenizer(BPE(vocabulary, merges, ignore_merges=pre in WHOLE_PIECES))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(PIECES[pre])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def sentence_piece(field: Fields) -> Tokenizer:
    """Build a SentencePiece tokenizer as BPE. Merges are sorted by score. In a tie the longer left part is first."""
    tokens, scores = field("tokenizer.ggml.tokens"), field("tokenizer.ggml.scores")
    if (longest := max(map(len, tokens), default=0)) > MAX_PIECE:
        raise TokenizerError(f"tokenizer.ggml.tokens: a token has {longest:,} characters; at most {MAX_PIECE} are read")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = [
        (-scores[index], -place, place - len(token), token[:place], token[place:])
        for token, index in vocabulary.items()
        for place in range(1, len(token))
        if token[:place] in vocabulary and token[place:] in vocabulary
    ]
    ordered = [(left, right) for *_, left, right in sorted(merges)]
    unknown = field("tokenizer.ggml.unknown_token_id")
    tokenizer = Tokenizer(BPE(vocabulary, ordered, unk_token=tokens[unknown or 0], fuse_unk=True, byte_fallback=True))
    has_prefix = field("tokenizer.ggml.add_space_prefix") in (None, True)
    replace = normalizers.Replace(" ", SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), replace] if has_prefix else [replace])
    strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    parts = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    tokenizer.decoder = decoders.Sequence(parts)
    return tokenizer
