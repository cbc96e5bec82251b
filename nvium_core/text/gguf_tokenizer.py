"""Builds a fast tokenizer from a GGUF file, with its chat template.

`tokenizer.ggml.pre` names the pre-tokenizer; names and patterns are from llama.cpp (src/llama-vocab.cpp). It tokenizes
like llama.cpp, but tekken and gpt-4o have the patterns of their own tokenizers, which llama.cpp approximates.
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
from nvium_core.text.folder_tokenizer import set_frame

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
CAPITALS, SMALL = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
UPPER_THEN_LOWER = rf"[^\r\n\p{{L}}\p{{N}}]?{CAPITALS}*{SMALL}+"
UPPER = rf"[^\r\n\p{{L}}\p{{N}}]?{CAPITALS}+{SMALL}*"
SIGNS = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CASED = (
    "A-Za-z\xb5\xc0-\xd6\xd8-\xf6\xf8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377"
    "\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-"
    "\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-"
    "\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80"
    "-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4"
    "\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d"
    "\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a"
    "\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-"
    "\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
"""Cased letters of an older Unicode, as the tokenizers of DeepSeek LLM list them."""


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
TEKKEN = split(rf"{UPPER_THEN_LOWER}|{UPPER}|\p{{N}}{SIGNS}")
GPT_4O = split(rf"{UPPER_THEN_LOWER}{CONTRACTIONS}?|{UPPER}{CONTRACTIONS}?|\p{{N}}{{1,3}}{SIGNS}")
DEEPSEEK_CODER = split("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")
DEEPSEEK_LLM = split(
    "[\r\n]", rf"\s?[{CASED}]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", "[一-龥ࠀ-一가-퟿]+", r"\p{N}+"
)
DEEPSEEK_V3 = split(
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"""
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)
GPT_2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
DEFAULT = split(r"[\p{P}$+<=>^~|]+", GPT_2_WORDS, r"\p{N}+", "[0-9][0-9][0-9]")

WHOLE_PIECES = ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "tekken")
"""Pre-tokenizers with which a piece that is in the vocabulary becomes one token. With these, a text begins with BOS."""

PIECES = {"default": DEFAULT, "tekken": TEKKEN, "gpt-4o": GPT_4O}
PIECES |= dict.fromkeys(("gpt-2", "olmo", "exaone4"), GPT_2)
PIECES |= {"deepseek-llm": DEEPSEEK_LLM, "deepseek-coder": DEEPSEEK_CODER, "deepseek-v3": DEEPSEEK_V3}
PIECES["hunyuan-dense"] = DEEPSEEK_V3
PIECES |= dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "minerva-7b"), SINGLE_DIGITS)
PIECES |= dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "smaug-bpe"), LLAMA_3)
PIECES |= dict.fromkeys(("dbrx", "chatglm-bpe", "glm4"), LLAMA_3)
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
    adds = {name: field(f"tokenizer.ggml.add_{name}_token") for name in ("bos", "eos")}
    if adds["bos"] is None:
        adds["bos"] = kind == "llama" or field("tokenizer.ggml.pre") in WHOLE_PIECES
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
