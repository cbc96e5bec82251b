"""tokenizer.json decides the tokens of a folder; its other files add names, begin-of-text, end-of-text and template."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from nvium_core.loading import bundled_model
from nvium_core.model.backbones import FAMILIES
from nvium_core.text.chat_template import ChatTemplate
from nvium_core.text.folder_tokenizer import folder_tokenizer, set_frame
from nvium_core.training.initial import given_tokenizer
from tests.text.tokenizer_kinds import BEGIN, END, KINDS, UNKNOWN, texts
from tests.training.small_runs import small_recipe

TYPES = ("nvium", *FAMILIES)
CLASSES = (
    *(None, "Unknown", "PreTrainedTokenizerFast", "MistralCommonBackend", "LlamaTokenizerFast", "GPT2Tokenizer"),
    *("Qwen2Tokenizer", "GemmaTokenizer", "T5Tokenizer"),
)
NAMES = {"bos_token": BEGIN, "eos_token": END, "unk_token": UNKNOWN}
TEXTS = texts()
MESSAGES = [{"role": "user", "content": "a fox"}]


def folder_of(folder: Path, tokenizer: Tokenizer, model_type: str = "llama", **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def plain(folder: Path) -> tuple[list[list[int]], list[str]]:
    """Return the file's token ids and what they decode to."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = [encoding.ids for encoding in tokenizer.encode_batch(TEXTS, add_special_tokens=False)]
    return ids, tokenizer.decode_batch(ids, skip_special_tokens=False)


def ours(tokenizer: PreTrainedTokenizerFast) -> tuple[list[list[int]], list[str]]:
    ids: list[list[int]] = tokenizer(TEXTS, add_special_tokens=False).input_ids
    return ids, tokenizer.batch_decode(ids)


@pytest.mark.parametrize("kind", KINDS)
def test_any_model_type_and_tokenizer_class_tokenizes_as_the_file_says(tmp_path, kind):
    """All kinds together have every pair of a type and a class."""
    tokenizer, turn = KINDS[kind](), [*KINDS].index(kind)
    assert len(KINDS) >= len(CLASSES)
    expected = plain(folder_of(tmp_path, tokenizer))
    for number, model_type in enumerate(TYPES):
        name = CLASSES[(number + turn) % len(CLASSES)]
        folder = folder_of(tmp_path, tokenizer, model_type, **({"tokenizer_class": name} if name else {}), **NAMES)
        assert ours(folder_tokenizer(folder)) == expected, (model_type, name)


def test_training_reads_the_file_too(tmp_path):
    folder = folder_of(tmp_path, KINDS["SmolLM"](), "qwen2", tokenizer_class="Qwen2Tokenizer")
    tokenizer = given_tokenizer(replace(small_recipe(), tokenizer=str(folder)))
    assert isinstance(tokenizer, PreTrainedTokenizerFast) and ours(tokenizer) == plain(folder)


def test_the_bundled_tokenizer_is_that_of_transformers():
    mine, theirs = folder_tokenizer(bundled_model()), AutoTokenizer.from_pretrained(bundled_model())
    assert mine(TEXTS).input_ids == theirs(TEXTS).input_ids and ours(mine) == ours(theirs)
    for name in ("chat_template", "special_tokens_map", "model_max_length", "padding_side", "name_or_path"):
        assert getattr(mine, name) == getattr(theirs, name)
    assert mine.get_vocab() == theirs.get_vocab()
    assert mine.backend_tokenizer.to_str() == theirs.backend_tokenizer.to_str()


B, E = [1], [2]


@pytest.mark.parametrize(
    ("stored", "config", "expected"),
    [
        (([], []), {}, ([], [])),
        ((B, []), {}, (B, [])),
        ((B, E), {}, (B, E)),
        (([], []), {"add_bos_token": True}, (B, [])),
        ((B, []), {"add_bos_token": True}, (B, [])),
        (([0], []), {"add_bos_token": True}, ([1, 0], [])),
        (([], []), {"add_bos_token": True, "add_eos_token": True}, (B, E)),
        ((B, []), {"add_bos_token": True, "add_eos_token": True}, (B, E)),
        ((B, E), {"add_bos_token": True}, (B, E)),
        ((B, E), {"add_bos_token": True, "add_eos_token": False}, (B, [])),
        ((B, E), {"add_bos_token": False}, ([], E)),
        ((B, []), {"add_bos_token": None, "add_eos_token": False}, (B, [])),
        (([], []), {"add_bos_token": True, "bos_token": None}, ([], [])),
        (([], []), {"add_bos_token": True, "add_eos_token": True, "bos_token": END}, (E, E)),
    ],
)
@pytest.mark.parametrize("kind", ["Llama 2", "WordLevel"])
def test_begin_and_end_of_text_are_what_the_configuration_asks_for_once(tmp_path, kind, stored, config, expected):
    tokenizer = KINDS[kind]()
    set_frame(tokenizer, *stored)
    folder = folder_of(tmp_path, tokenizer, tokenizer_class="LlamaTokenizer", **(NAMES | config))
    before, after = expected
    assert folder_tokenizer(folder)(TEXTS).input_ids == [[*before, *ids, *after] for ids in plain(folder)[0]]


def test_a_chat_has_one_begin_of_text(tmp_path):
    turns = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    folder = folder_of(tmp_path, KINDS["Llama 2"](), add_bos_token=True, chat_template=turns, **NAMES)
    tokenizer = folder_tokenizer(folder)
    assert ChatTemplate(tokenizer).token_ids(MESSAGES, []).count(1) == tokenizer("a fox").input_ids.count(1) == 1


def test_the_chat_template_may_have_its_own_file(tmp_path):
    folder = folder_of(tmp_path, KINDS["GPT-2"](), **NAMES)
    assert folder_tokenizer(folder).chat_template is None
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "json"}))
    assert folder_tokenizer(folder).chat_template == "json"
    folder_of(tmp_path, KINDS["GPT-2"](), chat_template="config", **NAMES)
    assert folder_tokenizer(folder).chat_template == "config"
    (folder / "chat_template.jinja").write_text("jinja")
    assert folder_tokenizer(folder).chat_template == "jinja"


def test_special_tokens_have_their_names_and_stored_tokens_are_added(tmp_path):
    added = {"300": {"content": "<|call|>", "special": True, "normalized": False}}
    folder = folder_of(tmp_path, KINDS["SmolLM"](), added_tokens_decoder=added, bos_token=BEGIN, eos_token="<|call|>")
    tokenizer = folder_tokenizer(folder)
    size = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size()
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, size)
    assert tokenizer("<|call|>").input_ids == [size]
    folder_of(folder, KINDS["SmolLM"]())
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": END, "lstrip": False}}))
    assert folder_tokenizer(folder).eos_token_id == 2


def test_decoding_is_cleaned_up_only_if_the_configuration_asks(tmp_path):
    ids = folder_tokenizer(folder_of(tmp_path, KINDS["WordLevel"]()))("the , fox ?").input_ids
    for config, text in (({}, "the , fox ?"), ({"clean_up_tokenization_spaces": True}, "the, fox?")):
        assert folder_tokenizer(folder_of(tmp_path, KINDS["WordLevel"](), **config)).decode(ids) == text


def test_the_precision_in_the_configuration_does_not_concern_the_tokenizer(tmp_path):
    folder = folder_of(tmp_path, KINDS["GPT-2"]())
    for fields in ({"dtype": "auto"}, {"torch_dtype": "torch.bfloat16"}):
        (folder / "config.json").write_text(json.dumps({"model_type": "llama", **fields}))
        assert ours(folder_tokenizer(folder)) == plain(folder)


@pytest.mark.parametrize("asks", [True, False])
def test_the_pattern_of_a_large_mistral_tokenizer_is_replaced_only_if_the_configuration_asks(tmp_path, asks):
    stored = json.loads(KINDS["Llama 3"]().to_str())
    stored["model"]["vocab"] |= {f"unused{index}": index for index in range(len(stored["model"]["vocab"]), 100_001)}
    tokenizer = Tokenizer.from_str(json.dumps(stored))
    folder = folder_of(tmp_path, tokenizer, "mistral", **({"fix_mistral_regex": True} if asks else {}))
    assert (ours(folder_tokenizer(folder)) == plain(folder)) is not asks
