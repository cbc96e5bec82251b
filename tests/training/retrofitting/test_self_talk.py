import json

import pytest
import torch

from nvium_core.training.data.conversations import assistant, read_conversations, user
from nvium_core.training.errors import DataError
from nvium_core.training.retrofitting import self_talk
from nvium_core.training.retrofitting.self_talk import SelfTalk, write_self_talk
from tests.byte_model import TURNS, wrapped_tokenizer
from tests.random_models import random_model


@pytest.fixture(autouse=True)
def few_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_talk, "MAX_SEQUENCES", 5)
    monkeypatch.setattr(self_talk, "MAX_ROUND", 16)


def talk(end_scale: float = 4.0) -> SelfTalk:
    model = random_model([4], vocab_size=257, context=512)
    with torch.no_grad():
        model.lm_head.weight[0] *= end_scale
    model.generation_config.eos_token_id = 0
    return SelfTalk(model, wrapped_tokenizer(TURNS))


def test_conversations_depend_on_their_seeds_only():
    first, again = (list(talk().round(range(16))) for _ in range(2))
    assert first and first == again
    assert all([turn["role"] for turn in messages] == ["user", "assistant"] for _, messages, _ in first)
    assert list(talk().round(range(8))) + list(talk().round(range(8, 16))) == first
    assert len({str(messages) for _, messages, _ in first}) > 1


def test_a_continued_file_equals_one_written_at_once(tmp_path):
    whole, parts, reports = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl", list[int]()
    write_self_talk(talk, whole, 2_000, reports.append)
    assert len(reports) > 1 and reports[-1] >= 2_000
    for enough in (1, 700, 2_000):
        write_self_talk(talk, parts, enough, lambda _: None)
    assert parts.read_text() == whole.read_text()
    counts = [json.loads(line)["tokens"] for line in whole.read_text().splitlines()]
    assert sum(counts[:-1]) < 2_000 <= sum(counts)
    assert read_conversations(whole)
    write_self_talk(lambda: pytest.fail("the file is complete"), whole, 2_000, reports.append)


def test_unicode_line_separators_do_not_end_a_line(tmp_path):
    file = tmp_path / "file.jsonl"
    line = {"messages": [user("one\u2028two"), assistant("\u0085")], "seed": 0, "tokens": 4}
    file.write_text(json.dumps(line, ensure_ascii=False) + "\n", encoding="utf-8")
    write_self_talk(talk, file, 5, lambda _: None)
    assert json.loads(file.read_text(encoding="utf-8").split("\n")[0]) == line


def test_a_model_whose_requests_never_end_is_refused(tmp_path):
    with pytest.raises(DataError, match="completed none of 5 generated conversations"):
        write_self_talk(lambda: talk(end_scale=-1e4), tmp_path / "file.jsonl", 10, lambda _: None)
