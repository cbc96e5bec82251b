import ctypes
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import pairwise, product
from pathlib import Path
from random import Random
from typing import Any

import gguf
import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers

from nvium_core.bench.contenders.llama_cpp import builds, load
from nvium_core.loading import gguf_file_tokenizer
from nvium_core.text.gguf_tokenizer import CONTROL, PIECES, SPACE, USER_DEFINED, TokenizerError, gguf_tokenizer
from tests.byte_model import byte_symbols
from tests.model.gguf_files import add_fields, close
from tests.public_model import needs_smollm, smollm

NORMAL, UNKNOWN, BYTE = 1, 2, 6
TEXT = (
    "The quick brown fox's 1234567 jumps; DON'T we'll I'VE over_the (lazy) dogs...\n\n\n  It cost $3.50,\tor 12%.  \n"
    "Übergrößenträger, naïve café — 東京は日本の首都です。 Привет, мир! 🙂🙃 e=mc^2 x<-y "
    "\r\n\r\n a  b   c\n if (x == 10) {\n        y();\n}"
)
LONG = " ".join([TEXT, TEXT.upper(), TEXT.title(), TEXT[::-1]])
ROOT = Path(__file__).parents[2]
PAGES = [Path(__file__), *sorted((ROOT / "docs").glob("*.md"))[:12], ROOT / "server/playground/page.js"]
"""Prose, tables, Python and JavaScript."""
END, TOOL = "<|end|>", "<tool>"
SAMPLES = (LONG, TEXT, "", " ", "  two", f"one{END}two {TOOL} three", "\n")
BEGINS_WITH_BOS = ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "tekken")


@cache
def trained(pre: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(PIECES[pre])
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=byte_symbols(), show_progress=False)
    tokenizer.train_from_iterator([LONG], trainer)
    tokenizer.add_special_tokens([END])
    tokenizer.add_tokens([AddedToken(TOOL, normalized=False)])
    return tokenizer


def byte_level_fields(pre: str) -> dict[str, Any]:
    """The fields of a file with a trained tokenizer."""
    learned = json.loads(trained(pre).to_str())["model"]
    tokens = sorted(learned["vocab"], key=learned["vocab"].__getitem__)
    end = len(tokens)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*tokens, END, TOOL],
        "tokenizer.ggml.token_type": [NORMAL] * len(tokens) + [CONTROL, USER_DEFINED],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in learned["merges"]],
        "tokenizer.ggml.bos_token_id": end,
        "tokenizer.ggml.eos_token_id": end,
        "tokenizer.chat_template": "{% for message in messages %}{{ message['content'] }}<|end|>{% endfor %}",
    }


def sentence_piece_fields() -> dict[str, Any]:
    """A vocabulary of word pieces with scores, and a token for every byte."""
    words = sorted({SPACE + word for word in LONG.split()})
    parts = sorted({word[:length] for word in words for length in (2, 3, 4, 6)} | set(LONG.replace(" ", SPACE)))
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *dict.fromkeys([*parts, *words])]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(rank) for rank in range(len(tokens) - 259)],
        "tokenizer.ggml.token_type": [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * (len(tokens) - 259),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


VOCABULARIES = {**{pre: byte_level_fields(pre) for pre in sorted(PIECES)}, "sentencepiece": sentence_piece_fields()}


@pytest.mark.parametrize("name", VOCABULARIES)
def test_decoding_inverts_encoding(name):
    tokenizer = gguf_tokenizer(VOCABULARIES[name].get)
    ids = tokenizer(LONG, add_special_tokens=False).input_ids
    assert len(ids) < len(LONG.encode())
    assert tokenizer.decode(ids) == LONG


@pytest.mark.parametrize("name", PIECES)
def test_tokens_equal_those_of_the_tokenizer_that_the_file_stores(name):
    tokenizer, expected = gguf_tokenizer(VOCABULARIES[name].get), trained(name)
    begin = [expected.token_to_id(END)] if name in BEGINS_WITH_BOS else []
    for text in SAMPLES:
        assert tokenizer(text).input_ids == begin + expected.encode(text).ids, text


def sentence_pieces(text: str, fields: dict[str, Any]) -> list[int]:
    """Tokenize by the definition: while neighbours form a token, join those whose token has the highest score.

    In a tie the pair with the longer left part is first, then the first pair.
    """
    ids = {token: number for number, token in enumerate(fields["tokenizer.ggml.tokens"])}
    scores = fields["tokenizer.ggml.scores"]
    pieces = list(SPACE + text.replace(" ", SPACE))
    while pairs := [(-scores[ids[a + b]], -len(a), i) for i, (a, b) in enumerate(pairwise(pieces)) if a + b in ids]:
        *_, first = min(pairs)
        pieces[first : first + 2] = ["".join(pieces[first : first + 2])]
    stored = [[piece] if piece in ids else [f"<0x{byte:02X}>" for byte in piece.encode()] for piece in pieces]
    return [ids[token] for tokens in stored for token in tokens]


@pytest.mark.parametrize("seed", range(20))
def test_sentence_pieces_are_joined_by_score(seed):
    random, fields = Random(seed), sentence_piece_fields()
    longer = ["".join(letters) for length in (2, 3, 4) for letters in product(f"{SPACE}ab", repeat=length)]
    tokens = [*fields["tokenizer.ggml.tokens"][:259], SPACE, "a", "b", *random.sample(longer, 40)]
    fields["tokenizer.ggml.tokens"] = tokens
    fields["tokenizer.ggml.scores"] = [float(score) for score in random.sample(range(len(tokens)), len(tokens))]
    fields["tokenizer.ggml.token_type"] = fields["tokenizer.ggml.token_type"][: len(tokens)]
    text = "".join(random.choices("aaabbb  é", k=60))
    assert gguf_tokenizer(fields.get)(text).input_ids == [1, *sentence_pieces(text, fields)]


def test_a_piece_in_the_vocabulary_that_no_merge_makes_is_one_token_for_some_pre_tokenizers():
    vocabulary = {"tokens": ["a", "b", "c", "ab", "abc"], "merges": ["a b"], "model": "gpt2"}
    for pre in PIECES:
        fields = {f"tokenizer.ggml.{name}": value for name, value in (vocabulary | {"pre": pre}).items()}
        assert gguf_tokenizer(fields.get)("abc").input_ids == ([4] if pre in BEGINS_WITH_BOS else [3, 2]), pre


needs_llama_cpp = pytest.mark.skipif(not builds(), reason="llama.cpp is not installed; pip install 'nvium[bench]'")


OWN_PIECES = {
    "gpt-4o": "cafe\u0301| прив|Ет| ÉCOLE'S| İstanbul|123|45| a|/b|///\n",
    "tekken": "cafe\u0301| прив|Ет| ÉCOLE|'S| İstanbul|1|2|3|4|5| a|/b|///\n",
}
"""Pieces of the models' own tokenizers. llama.cpp's patterns, which lack letters beyond ASCII, approximate them."""

LLAMA_CPPS_PIECES = {
    "default": "DON|'|T| we|'|ll| | |123|45|,| x|_|y|=$|3| a|/|b|//|\n| naïve| 東京は|…|\r\n\n| end| ",
    "gpt-2": "DON|'|T| we|'ll| | 12345|,| x|_|y|=$|3| a|/|b|//|\n| naïve| 東京は|…|\r\n\n| end| ",
    "smollm starcoder refact command-r minerva-7b": (
        "DON|'|T| we|'ll|  |1|2|3|4|5|,| x|_|y|=$|3| a|/|b|//|\n| naïve| 東京は|…|\r\n\n| end| "
    ),
    "llama3 llama-v3 llama-bpe falcon3 pixtral smaug-bpe": (
        "DON|'T| we|'ll| | |123|45|,| x|_y|=$|3| a|/b|//\n| naïve| 東京は|…\r\n\n| end| "
    ),
    "qwen2 megrez deepseek-r1-qwen": (
        "DON|'T| we|'ll| | |1|2|3|4|5|,| x|_y|=$|3| a|/b|//\n| naïve| 東京は|…\r\n\n| end| "
    ),
    "deepseek-coder": ("DON|'|T| we|'|ll|  |1|2|3|4|5|,| x|_|y|=$|3| a|/|b|//|\n| naïve| |東京は|…|\r|\n|\n| end| "),
    "deepseek-llm": "DON|'|T| we|'|ll|  |12345|,| x|_|y|=$|3| a|/|b|//|\n| na|ï|ve| |東京は…|\r|\n|\n| end| ",
    "deepseek-v3": "DON|'T| we|'ll|  |123|45|,| x|_y|=$|3| a|/b|//\n| naïve| |東京は|…\r\n\n| end| ",
}


@pytest.mark.parametrize("names", LLAMA_CPPS_PIECES | OWN_PIECES)
def test_a_text_is_split_into_the_pieces_of_its_pre_tokenizer(names):
    expected = (LLAMA_CPPS_PIECES | OWN_PIECES)[names].split("|")
    text = "".join(expected)
    for name in names.split():
        pieces = pre_tokenizers.Sequence(PIECES[name]).pre_tokenize_str(text)
        assert [text[begin:end] for _, (begin, end) in pieces] == expected


@needs_llama_cpp
@pytest.mark.parametrize("name", sorted(VOCABULARIES.keys() - OWN_PIECES.keys()))
def test_tokens_equal_llama_cpps(name, tmp_path):
    tokenizer = gguf_tokenizer(VOCABULARIES[name].get)
    writer = gguf.GGUFWriter(tmp_path / "vocabulary.gguf", "llama")
    writer.add_block_count(1)
    add_fields(writer, VOCABULARIES[name])
    close(writer)
    with llama_cpp_vocabulary(tmp_path / "vocabulary.gguf") as theirs:
        for text in SAMPLES:
            assert tokenizer(text).input_ids == theirs(text), text


@needs_llama_cpp
@needs_smollm
def test_tokens_of_long_texts_equal_llama_cpps_for_a_public_model():
    tokenizer = gguf_file_tokenizer(smollm())
    texts = [LONG, *(page.read_text(encoding="utf-8") for page in PAGES)]
    with llama_cpp_vocabulary(smollm()) as theirs:
        ours, expected = ([tokenize(text) for text in texts] for tokenize in (lambda t: tokenizer(t).input_ids, theirs))
    assert sum(map(len, ours)) > 20_000
    assert ours == expected


@contextmanager
def llama_cpp_vocabulary(path: Path) -> Iterator[Callable[[str], list[int]]]:
    lib = load(next(iter(builds().values())))
    params = lib.llama_model_default_params()
    params.vocab_only = True
    model = lib.llama_model_load_from_file(str(path).encode(), params)
    assert model is not None

    def tokenize(text: str) -> list[int]:
        data = text.encode()
        room = len(data) + 8
        tokens = (ctypes.c_int32 * room)()
        number = lib.llama_tokenize(lib.llama_model_get_vocab(model), data, len(data), tokens, room, True, True)
        return list(tokens[:number])

    yield tokenize
    lib.llama_model_free(model)


def test_control_tokens_are_special_and_the_template_is_the_files():
    tokenizer = gguf_tokenizer(VOCABULARIES["qwen2"].get)
    end = VOCABULARIES["qwen2"]["tokenizer.ggml.eos_token_id"]
    assert tokenizer(f"a{END}").input_ids[-1] == end == tokenizer.eos_token_id
    assert tokenizer.decode([end], skip_special_tokens=True) == ""
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == f"hi{END}"


def test_a_file_without_pre_tokenizer_warns_and_gets_llama_cpps_default(caplog):
    fields = {name: value for name, value in VOCABULARIES["default"].items() if name != "tokenizer.ggml.pre"}
    assert gguf_tokenizer(fields.get)(TEXT).input_ids == gguf_tokenizer(VOCABULARIES["default"].get)(TEXT).input_ids
    assert "tokenizer.ggml.pre" in caplog.text


def test_ties_of_scores_merge_the_longer_left_part_first():
    spaces = [SPACE * length for length in (1, 2, 3, 4, 8, 16)]
    tokens = ["<unk>", "<s>", "</s>", *spaces]
    fields = sentence_piece_fields() | {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 3 + [-1e9] + [-1.0] * 5,
        "tokenizer.ggml.token_type": [UNKNOWN, CONTROL, CONTROL] + [NORMAL] * 6,
    }
    assert gguf_tokenizer(fields.get).tokenize(" " * 18) == [SPACE * 16, SPACE * 3]


def test_tokens_that_cost_too_much_and_ids_outside_the_vocabulary_are_refused():
    fields = sentence_piece_fields()
    long = fields | {"tokenizer.ggml.tokens": [*fields["tokenizer.ggml.tokens"], "a" * 100_000]}
    with pytest.raises(TokenizerError, match="a token has 100,000 characters; at most 512"):
        gguf_tokenizer(long.get)
    with pytest.raises(TokenizerError, match=r"bos_token_id must be in \[0, \d+\), got -1"):
        gguf_tokenizer((fields | {"tokenizer.ggml.bos_token_id": -1}).get)
