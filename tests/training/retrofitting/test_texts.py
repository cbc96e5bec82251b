import json

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from nvium_core.training.errors import DataError
from nvium_core.training.retrofitting.texts import document_numbers, read_text
from tests.byte_model import END_OF_TEXT, TURNS, wrapped_tokenizer

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
