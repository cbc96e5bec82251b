"""The tokenizer and chat template in a GGUF file, as a fast tokenizer.

Gives the tokens that llama.cpp gives: `tokenizer.ggml.pre` decides how a text is first split, with llama.cpp's names
and patterns (src/llama-vocab.cpp).
"""

from collections.abc import Callable
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import PreTokenizer
from transformers import PreTrainedTokenizerFast

from nvium_core.errors import NviumError

Fields = Callable[[str], Any]
"""A field of the file by name, None if missing."""

CONTROL, USER_DEFINED = 3, 4
"""Of `tokenizer.ggml.token_type`: tokens that text never becomes, and tokens matched before all others."""

SPACE = "▁"
CONTRACTIONS = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER_THEN_LOWER = r"[^\r\n\p{L}\p{N}]?((?=[\p{L}])([^a-z]))*((?=[\p{L}])([^A-Z]))+"
UPPER = r"[^\r\n\p{L}\p{N}]?((?=[\p{L}])([^a-z]))+((?=[\p{L}])([^A-Z]))*"


class TokenizerError(NviumError, ValueError):
    """A tokenizer that cannot be built; the message says what is unknown."""


def pieces(pattern: str) -> list[PreTokenizer]:
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    return [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]


GPT_2: list[PreTokenizer] = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
SINGLE_DIGITS: list[PreTokenizer] = [pre_tokenizers.Digits(individual_digits=True), *GPT_2]
LLAMA_3 = pieces(rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}{REST}")
QWEN_2 = pieces(rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{REST}")
TEKKEN = pieces(rf"{UPPER_THEN_LOWER}|{UPPER}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")

PIECES: dict[str, list[PreTokenizer]] = {
    "gpt-2": GPT_2,
    "smollm": SINGLE_DIGITS,
    "starcoder": SINGLE_DIGITS,
    "refact": SINGLE_DIGITS,
    "command-r": SINGLE_DIGITS,
    "llama3": LLAMA_3,
    "llama-v3": LLAMA_3,
    "llama-bpe": LLAMA_3,
    "qwen2": QWEN_2,
    "deepseek-r1-qwen": QWEN_2,
    "tekken": TEKKEN,
}
WHOLE_PIECES = ("llama3", "llama-v3", "llama-bpe", "tekken")
"""A pre-tokenized piece that is itself a token is never merged from smaller ones, and a text begins with the
begin-of-text token."""


def gguf_tokenizer(field: Fields) -> PreTrainedTokenizerFast:
    """Raises `TokenizerError` for an unknown kind."""
    kinds = {"gpt2": byte_level, "llama": sentence_piece}
    kind = field("tokenizer.ggml.model")
    if kind not in kinds:
        raise TokenizerError(f"tokenizer {kind!r} is none of those that load: {', '.join(kinds)}")
    tokenizer = kinds[kind](field)
    tokens, types = field("tokenizer.ggml.tokens"), field("tokenizer.ggml.token_type") or []
    for token, kind_of in zip(tokens, types, strict=False):
        if kind_of in (CONTROL, USER_DEFINED):
            tokenizer.add_tokens([AddedToken(token, special=kind_of == CONTROL, normalized=False)])
    named = {name: field(f"tokenizer.ggml.{theirs}_token_id") for name, theirs in NAMED.items()}
    special = {f"{name}_token": tokens[token] for name, token in named.items() if token is not None}
    if begins_with_bos(field, kind) and "bos_token" in special:
        begin = special["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{begin} $A", pair=f"{begin} $A {begin} $B", special_tokens=[(begin, named["bos"])]
        )
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **special)
    made.chat_template = field("tokenizer.chat_template")
    return made


NAMED = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}


def begins_with_bos(field: Fields, kind: str) -> bool:
    said = field("tokenizer.ggml.add_bos_token")
    return bool(kind == "llama" or field("tokenizer.ggml.pre") in WHOLE_PIECES) if said is None else bool(said)


def byte_level(field: Fields) -> Tokenizer:
    pre = field("tokenizer.ggml.pre") or "gpt-2"
    if pre not in PIECES:
        raise TokenizerError(f"tokenizer.ggml.pre {pre!r} is none of those that load: {', '.join(PIECES)}")
    merges = [tuple(merge.split(" ", 1)) for merge in field("tokenizer.ggml.merges") or ()]
    vocabulary = {token: index for index, token in enumerate(field("tokenizer.ggml.tokens"))}
    tokenizer = Tokenizer(BPE(vocabulary, merges, ignore_merges=pre in WHOLE_PIECES))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(PIECES[pre])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def sentence_piece(field: Fields) -> Tokenizer:
    """A token's score is its merge priority."""
    tokens, scores = field("tokenizer.ggml.tokens"), field("tokenizer.ggml.scores")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = [
        (-scores[index], place, token[:place], token[place:])
        for token, index in vocabulary.items()
        for place in range(1, len(token))
        if token[:place] in vocabulary and token[place:] in vocabulary
    ]
    ordered = [(left, right) for _, _, left, right in sorted(merges)]
    unknown = field("tokenizer.ggml.unknown_token_id")
    tokenizer = Tokenizer(BPE(vocabulary, ordered, unk_token=tokens[unknown or 0], fuse_unk=True, byte_fallback=True))
    has_prefix = field("tokenizer.ggml.add_space_prefix") in (None, True)
    replace = normalizers.Replace(" ", SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), replace] if has_prefix else [replace])
    strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    parts = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    tokenizer.decoder = decoders.Sequence(parts)
    return tokenizer
