import lzma

import pytest

from nvium_core.training.data.corpus import read_documents
from nvium_core.training.errors import DataError

TEXT = "Title\n\nOne.\n<|endoftext|>\nTwo <|endoftext|> in a line.\n<|endoftext|>\n\n<|endoftext|>\nThrée.\n"
DOCUMENTS = ["Title\n\nOne.", "Two <|endoftext|> in a line.", "Thrée."]
FILES = {"text.txt": TEXT.encode(), "windows.txt": b"\xef\xbb\xbf" + TEXT.replace("\n", "\r\n").encode()}
FILES["text.txt.xz"] = lzma.compress(TEXT.encode())


@pytest.mark.parametrize("name", FILES)
def test_separator_lines_separate_documents(tmp_path, name):
    (tmp_path / name).write_bytes(FILES[name])
    assert read_documents(tmp_path / name) == DOCUMENTS


def test_an_unusable_file_is_named(tmp_path):
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
    (tmp_path / "folder.txt").mkdir()
    for name in (*damaged, "nowhere.txt", "nowhere.xz", "folder.txt"):
        with pytest.raises(DataError, match=name):
            read_documents(tmp_path / name)


@pytest.mark.parametrize("name", ["text.txt", "text.xz"])
def test_binary_data_are_named_by_file_and_line(tmp_path, name):
    content = TEXT.encode() * 1000 + b"\n\xff\x00\n" + TEXT.encode() * 1000
    (tmp_path / name).write_bytes(lzma.compress(content) if name.endswith(".xz") else content)
    line = 1000 * TEXT.count("\n") + 2
    with pytest.raises(DataError, match=rf"{name}, line {line}: is not UTF-8 text \(invalid start byte\)"):
        read_documents(tmp_path / name)
