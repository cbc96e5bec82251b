import json
import lzma
from pathlib import Path

import numpy as np
import pytest

from nvium_core.errors import DataError
from nvium_core.training.data.texts import END_OF_TEXT, assistant, example, read_conversations, system, user

TALK = [system("Be kind."), user("Thé cat?"), assistant("It ran.")]
GOOD = json.dumps({"messages": TALK, "source": "here"}, ensure_ascii=False)


def write_lines(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_each_line_is_a_conversation_or_a_plain_text(tmp_path):
    text = '{"text": " The cat ran.\\n", "source": "here"}'
    path = write_lines(tmp_path / "chat.jsonl", GOOD, "", GOOD.replace("ran", "sat"), text, "")
    assert read_conversations(path) == {1: TALK, 3: [*TALK[:2], assistant("It sat.")], 4: "The cat ran."}


def test_compression_and_windows_line_endings_do_not_matter(tmp_path):
    compressed, windows = tmp_path / "chat.jsonl.xz", tmp_path / "chat.jsonl"
    compressed.write_bytes(lzma.compress(f"{GOOD}\n".encode()))
    windows.write_bytes(b"\xef\xbb\xbf" + f"{GOOD}\r\n".encode())
    assert read_conversations(compressed) == read_conversations(windows) == {1: TALK}


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "Expecting"),
        ("[]", "messages"),
        ('{"messages": {}}', "messages"),
        ('{"text": " "}', "text must be a non-empty string, got ' '"),
        ('{"text": ["a"]}', "text must be a non-empty string"),
        ('{"text": "\\ud800"}', "surrogates"),
        ('{"messages": [1]}', "role must be one of system, user, assistant"),
        ('{"messages": []}', "no message has the role assistant"),
        (json.dumps({"messages": TALK[:2]}), "no message has the role assistant"),
        (json.dumps({"messages": TALK[2:]}), "the first message must not have the role assistant"),
        (json.dumps({"messages": [{"role": "judge", "content": "a"}]}), "got 'judge'"),
        (json.dumps({"messages": [user(" ")]}), "content must be a non-empty string"),
        (json.dumps({"messages": [{"role": "user", "content": ["a"]}]}), "content must be a non-empty string"),
        ('{"messages": [{"role": "user", "content": "\\ud800"}]}', "surrogates"),
        ("[" * 100_000, "recursion"),
    ],
)
def test_an_invalid_line_is_refused_by_file_and_number(line, complaint, tmp_path):
    path = write_lines(tmp_path / "chat.jsonl", GOOD, line, GOOD)
    with pytest.raises(DataError, match=rf"chat\.jsonl, line 2: .*{complaint}"):
        read_conversations(path)


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\xff\xfe"])
def test_a_file_without_conversations_is_refused_by_name(content, tmp_path):
    (tmp_path / "chat.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=r"chat\.jsonl"):
        read_conversations(tmp_path / "chat.jsonl")


def test_only_answers_and_their_end_of_text_count(tokenizer):
    talk = [system("be big"), user(" the cat\n"), assistant("it ran"), user("so"), assistant("it sat"), user("and")]
    tuned = example(talk, tokenizer)
    parts = np.split(tuned.tokens, np.flatnonzero(np.diff(tuned.is_answer)) + 1)
    assert [tokenizer.decode(part) for part in parts] == [
        f"{END_OF_TEXT}System:\nbe big{END_OF_TEXT}User:\nthe cat{END_OF_TEXT}Assistant:\n",
        f"it ran{END_OF_TEXT}",
        f"User:\nso{END_OF_TEXT}Assistant:\n",
        f"it sat{END_OF_TEXT}",
    ]
    assert tuned.is_answer[-1] and not tuned.is_answer[0]


def test_all_of_a_plain_text_counts_and_is_tokenized_as_in_the_server(tokenizer):
    plain = example("the cat ran", tokenizer)
    assert tokenizer.decode(plain.tokens) == f"{END_OF_TEXT}the cat ran{END_OF_TEXT}"
    assert plain.tokens[:-1].tolist() == tokenizer("the cat ran").input_ids
    assert plain.is_answer.tolist() == [False] + [True] * (len(plain) - 1)
    with pytest.raises(DataError, match="special token"):
        example(f"the {END_OF_TEXT} cat", tokenizer)


def test_a_template_that_changes_earlier_answers_is_refused(tokenizer):
    tokenizer.chat_template = "{{ bos_token + messages[-1].content }}"
    assert example([user("the cat"), assistant("ran")], tokenizer).is_answer.any()
    with pytest.raises(DataError, match="changes an answer when another message follows"):
        example([user("the cat"), assistant("ran"), user("so"), assistant("sat")], tokenizer)
