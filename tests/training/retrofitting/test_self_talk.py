import json
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from nvium_core.training.chat.conversations import assistant, read_conversations, user
from nvium_core.training.data.documents import DataError
from nvium_core.training.retrofitting import self_talk
from nvium_core.training.retrofitting.self_talk import SelfTalk, write_self_talk
from tests.byte_model import END_OF_TEXT, byte_tokenizer
from tests.random_models import random_model

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}" + END_OF_TEXT + "{% endfor %}<assistant>"


@pytest.fixture(autouse=True)
def few_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_talk, "SEATS", 5)
    monkeypatch.setattr(self_talk, "MAX_ROUND", 16)


def talk(likes_to_end: float = 4.0) -> SelfTalk:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer(), eos_token=END_OF_TEXT)
    tokenizer.chat_template = TEMPLATE
    model = random_model([4], vocab_size=257, context=512)
    with torch.no_grad():
        model.lm_head.weight[0] *= likes_to_end
    model.generation_config.eos_token_id = 0
    return SelfTalk(model, tokenizer)


def test_a_request_is_sampled_behind_the_template_and_then_its_answer() -> None:
    first, again = (list(talk().round(range(16))) for _ in range(2))
    assert first and first == again
    assert all([turn["role"] for turn in said] == ["user", "assistant"] for _, said, _ in first)
    assert list(talk().round(range(8))) + list(talk().round(range(8, 16))) == first
    assert len({str(said) for _, said, _ in first}) > 1


def test_a_file_is_gone_on_with_where_it_ends(tmp_path: Path) -> None:
    whole, parts, told = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl", list[int]()
    write_self_talk(talk, whole, 2_000, told.append)
    assert len(told) > 1 and told[-1] >= 2_000
    for enough in (1, 700, 2_000):
        write_self_talk(talk, parts, enough, lambda _: None)
    assert parts.read_text() == whole.read_text()
    counts = [json.loads(line)["tokens"] for line in whole.read_text().splitlines()]
    assert sum(counts[:-1]) < 2_000 <= sum(counts)
    assert read_conversations(whole)
    write_self_talk(lambda: pytest.fail("nothing is left to say"), whole, 2_000, told.append)


def test_what_is_no_end_of_a_line_in_json_is_none_in_the_file(tmp_path: Path) -> None:
    file = tmp_path / "file.jsonl"
    said = {"messages": [user("one\u2028two"), assistant("\u0085")], "seed": 0, "tokens": 4}
    file.write_text(json.dumps(said, ensure_ascii=False) + "\n", encoding="utf-8")
    write_self_talk(talk, file, 5, lambda _: None)
    assert json.loads(file.read_text(encoding="utf-8").split("\n")[0]) == said


def test_a_model_whose_requests_never_end_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="none of 5 requests that the model made up ended"):
        write_self_talk(lambda: talk(likes_to_end=-1e4), tmp_path / "file.jsonl", 10, lambda _: None)
