import json
import lzma
from pathlib import Path

import pytest

from nvium_core.training.chat.conversations import assistant, read_conversations, system, user
from nvium_core.training.data.documents import DataError

TALK = [system("Be kind."), user("Thé cat?"), assistant("It ran.")]
GOOD = json.dumps({"messages": TALK, "source": "here"}, ensure_ascii=False)


def written(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_each_line_is_a_conversation_and_known_by_its_number(tmp_path: Path) -> None:
    path = written(tmp_path / "chat.jsonl", GOOD, "", GOOD.replace("ran", "sat"), "")
    assert read_conversations(path) == {1: TALK, 3: [*TALK[:2], assistant("It sat.")]}


def test_a_line_may_be_a_plain_text(tmp_path: Path) -> None:
    path = written(tmp_path / "chat.jsonl", GOOD, '{"text": " The cat ran.\\n", "source": "here"}')
    assert read_conversations(path) == {1: TALK, 2: "The cat ran."}


def test_compressed_chats_and_line_endings_of_windows_change_nothing(tmp_path: Path) -> None:
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
        ('{"text": " "}', "text must be a text, got ' '"),
        ('{"text": ["a"]}', "text must be a text"),
        ('{"text": "\\ud800"}', "surrogates"),
        ('{"messages": [1]}', "role must be one of system, user, assistant"),
        ('{"messages": []}', "nothing is said by the assistant"),
        (json.dumps({"messages": TALK[:2]}), "nothing is said by the assistant"),
        (json.dumps({"messages": TALK[2:]}), "must not speak first"),
        (json.dumps({"messages": [{"role": "judge", "content": "a"}]}), "got 'judge'"),
        (json.dumps({"messages": [user(" ")]}), "content must be a text"),
        (json.dumps({"messages": [{"role": "user", "content": ["a"]}]}), "content must be a text"),
        ('{"messages": [{"role": "user", "content": "\\ud800"}]}', "surrogates"),
        ("[" * 100_000, "recursion"),
    ],
)
def test_a_bad_line_is_refused_by_file_and_number(line: str, complaint: str, tmp_path: Path) -> None:
    path = written(tmp_path / "chat.jsonl", GOOD, line, GOOD)
    with pytest.raises(DataError, match=rf"chat\.jsonl, line 2: .*{complaint}"):
        read_conversations(path)


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\xff\xfe"])
def test_a_file_of_no_conversations_is_refused_by_name(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "chat.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=r"chat\.jsonl"):
        read_conversations(tmp_path / "chat.jsonl")
