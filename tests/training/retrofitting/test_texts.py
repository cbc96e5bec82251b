import json

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from nvium_core.errors import DataError
from nvium_core.training.data.texts import assistant, read_conversations, user
from nvium_core.training.retrofitting import texts
from nvium_core.training.retrofitting.texts import SelfTalk, document_numbers, read_text, write_self_talk
from tests.byte_model import END_OF_TEXT, TURNS, wrapped_tokenizer
from tests.random_models import random_model

CONTEXT = 32
DOCUMENTS = [f"Document {number} " + "x" * (3 * number) for number in range(40)]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return wrapped_tokenizer(TURNS)


def test_windows_of_a_text_contain_every_token(tmp_path, tokenizer):
    file = tmp_path / "text.txt"
    file.write_text(f"\n{END_OF_TEXT}\n".join(DOCUMENTS))
    text = read_text(file, tokenizer, CONTEXT, 10_000)
    assert text.kind == "text"
    examples = text.training + text.held_out
    assert max(map(len, examples)) == CONTEXT + 1
    assert all(each.is_answer.all() for each in examples)
    assert tokenizer.decode(np.concatenate([each.tokens[1:] for each in examples])) == "".join(DOCUMENTS)
    assert 0 < sum(map(len, text.held_out)) <= 0.1 * sum(map(len, examples))
    numbers = document_numbers(examples)
    assert numbers[-1] == len(DOCUMENTS) - 1 and numbers == sorted(numbers) and len(numbers) > len(DOCUMENTS)


def test_only_answers_of_conversations_count(tmp_path, tokenizer):
    file = tmp_path / "chats.jsonl"
    lines = [
        [{"role": "user", "content": "u" * number}, {"role": "assistant", "content": "a" * 9}]
        for number in range(1, 40)
    ]
    file.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in lines))
    text = read_text(file, tokenizer, CONTEXT, 10_000)
    assert text.kind == "conversations"
    examples = text.training + text.held_out
    assert max(map(len, examples)) == CONTEXT + 1
    assert 0 < len(examples) < len(lines)  # some answers begin after the window
    answers = {tokenizer.decode(each.tokens[each.is_answer]) for each in examples}
    assert "a" * 9 + END_OF_TEXT in answers and all(each.startswith("a") for each in answers)


def test_at_least_one_example_is_held_out_and_a_text_that_is_too_short_is_named(tmp_path, tokenizer):
    file = tmp_path / "short.txt"
    file.write_text("x" * (2 * CONTEXT))
    text = read_text(file, tokenizer, CONTEXT, 10_000)
    assert len(text.training) >= 1 == len(text.held_out)
    file.write_text("too short")
    with pytest.raises(DataError, match=r"short\.txt: .* are too few"):
        read_text(file, tokenizer, CONTEXT, 100)


@pytest.fixture(autouse=True)
def few_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "MAX_SEQUENCES", 5)
    monkeypatch.setattr(texts, "MAX_ROUND", 16)


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
