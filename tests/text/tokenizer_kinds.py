"""Small tokenizers of many kinds, and texts that they tokenize differently."""

from collections.abc import Callable
from random import Random

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers.decoders import Decoder
from tokenizers.models import Model
from tokenizers.normalizers import Normalizer
from tokenizers.pre_tokenizers import PreTokenizer

BEGIN, END, UNKNOWN = "<s>", "</s>", "<unk>"
PIECES = (
    *("the", " fox", " jumped", "  lead", "don't", "n't", "'s", "I'LL", "HelloWorld", "naïve", "cafe\u0301", "ﬁne"),
    *("Straße", "日本語", "привет", "👩\u200d🚀", "1", " 42", "1234567", "3.14", "a_b", "x=y+1;"),
    *(" ,", "!!!", "(", " .", " ?"),
    *("\n", "\n\n\n", "\r\n", "\t", "    ", " ", "\u00a0", "\u3000", "\ufffd", "\u0378", BEGIN, f" {END} "),
)


def texts(count: int = 200) -> list[str]:
    draw = Random(0)
    mixed = ["".join(draw.choices(PIECES, k=draw.randint(2, 12))) for _ in range(count - len(PIECES) - 1)]
    return ["", *PIECES, *mixed]


LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT_2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
SPLIT = (pre_tokenizers.Split(Regex(LLAMA_3), "isolated"), BYTES)
FROM_SPACES = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]


def trained(model: Model, trainer: trainers.Trainer, **parts: Normalizer | PreTokenizer | Decoder) -> Tokenizer:
    tokenizer = Tokenizer(model)
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    tokenizer.train_from_iterator(texts(), trainer)
    return tokenizer


def special(*more: str) -> list[str]:
    return [UNKNOWN, BEGIN, END, *more]


def byte_level(*pieces: PreTokenizer, **parts: Normalizer) -> Tokenizer:
    tokens = {"special_tokens": special(), "initial_alphabet": pre_tokenizers.ByteLevel.alphabet()}
    trainer = trainers.BpeTrainer(vocab_size=500, show_progress=False, **tokens)
    split = pre_tokenizers.Sequence(list(pieces))
    return trained(models.BPE(), trainer, pre_tokenizer=split, decoder=decoders.ByteLevel(), **parts)


def sentence_piece(*decoder: Decoder, **parts: Normalizer | PreTokenizer) -> Tokenizer:
    tokens = special(*(f"<0x{byte:02X}>" for byte in range(256)))
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=tokens, limit_alphabet=40, show_progress=False)
    model = models.BPE(unk_token=UNKNOWN, fuse_unk=True, byte_fallback=True)
    return trained(model, trainer, decoder=decoders.Sequence(list(decoder)), **parts)


def unigram() -> Tokenizer:
    trainer = trainers.UnigramTrainer(vocab_size=120, show_progress=False, special_tokens=special(), unk_token=UNKNOWN)
    parts = {"normalizer": normalizers.NFKC(), "pre_tokenizer": pre_tokenizers.Metaspace()}
    return trained(models.Unigram(), trainer, decoder=decoders.Metaspace(), **parts)


def word_level() -> Tokenizer:
    trainer = trainers.WordLevelTrainer(special_tokens=special(), show_progress=False)
    return trained(models.WordLevel(unk_token=UNKNOWN), trainer, pre_tokenizer=pre_tokenizers.Whitespace())


def word_piece() -> Tokenizer:
    trainer = trainers.WordPieceTrainer(vocab_size=150, special_tokens=special(), show_progress=False)
    parts = {"normalizer": normalizers.Lowercase(), "pre_tokenizer": pre_tokenizers.BertPreTokenizer()}
    return trained(models.WordPiece(unk_token=UNKNOWN), trainer, decoder=decoders.WordPiece(), **parts)


TO_SPACES = normalizers.Replace(" ", "▁")
TO_WORDS = normalizers.Sequence([normalizers.Prepend("▁"), TO_SPACES])
AT_SPACES = pre_tokenizers.Split(" ", "merged_with_previous")
KINDS: dict[str, Callable[[], Tokenizer]] = {
    "GPT-2": lambda: byte_level(GPT_2),
    "SmolLM": lambda: byte_level(pre_tokenizers.Digits(individual_digits=True), GPT_2),
    "Llama 3": lambda: byte_level(*SPLIT),
    "Qwen": lambda: byte_level(*SPLIT, normalizer=normalizers.NFC()),
    "Llama 2": lambda: sentence_piece(*FROM_SPACES, normalizer=TO_WORDS),
    "Gemma": lambda: sentence_piece(*FROM_SPACES[:3], normalizer=TO_SPACES, pre_tokenizer=AT_SPACES),
    "Mistral": lambda: sentence_piece(*FROM_SPACES, pre_tokenizer=pre_tokenizers.Metaspace("▁", "first", split=False)),
    "Unigram": unigram,
    "WordLevel": word_level,
    "WordPiece": word_piece,
}
