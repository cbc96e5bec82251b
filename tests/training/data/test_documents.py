import lzma
from pathlib import Path

import pytest

from nvium_core.training.data.documents import DataError, read_documents

TEXT = "Title\n\nOne.\n<|endoftext|>\nTwo <|endoftext|> in a line.\n<|endoftext|>\n\n<|endoftext|>\nThrée.\n"
DOCUMENTS = ["Title\n\nOne.", "Two <|endoftext|> in a line.", "Thrée."]


def test_documents_are_what_stands_between_separator_lines(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    assert read_documents(path) == DOCUMENTS


def test_line_endings_of_windows_and_a_byte_order_mark_change_nothing(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(b"\xef\xbb\xbf" + TEXT.replace("\n", "\r\n").encode())
    assert read_documents(path) == DOCUMENTS


def test_unusable_text_is_refused_naming_the_file(tmp_path: Path) -> None:
    compressed = lzma.compress(TEXT.encode() * 50)
    damaged = {
        "empty.txt": b"",
        "blank.txt": b"\n\n<|endoftext|>\n",
        "latin1.txt": "Thrée".encode("latin-1"),
        "truncated.xz": compressed[: len(compressed) // 2],
        "not-compressed.xz": TEXT.encode(),
        "empty.xz": b"",
        "latin1.xz": lzma.compress("Thrée".encode("latin-1")),
    }
    for name, content in damaged.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=name):
            read_documents(tmp_path / name)


def test_a_file_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "folder.txt").mkdir()
    for name in ("nowhere.txt", "nowhere.xz", "folder.txt"):
        with pytest.raises(DataError, match=name):
            read_documents(tmp_path / name)
