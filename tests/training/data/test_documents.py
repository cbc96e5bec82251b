import lzma
import tracemalloc
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from nvium_core.errors import DataError
from nvium_core.training.data import source
from nvium_core.training.data.source import prepare_text, write_tokens
from nvium_core.training.data.texts import documents_of
from tests.training.small_runs import small_corpus, small_recipe

TEXT = "Title\n\nOne.\n<|endoftext|>\nTwo <|endoftext|> in a line.\n<|endoftext|>\n\n<|endoftext|>\nThrée.\n"
DOCUMENTS = ["Title\n\nOne.", "Two <|endoftext|> in a line.", "Thrée."]
FILES = {"text.txt": TEXT.encode(), "windows.txt": b"\xef\xbb\xbf" + TEXT.replace("\n", "\r\n").encode()}
FILES["text.txt.xz"] = lzma.compress(TEXT.encode())


@pytest.mark.parametrize("name", FILES)
def test_separator_lines_separate_documents(tmp_path, name):
    (tmp_path / name).write_bytes(FILES[name])
    assert list(documents_of(tmp_path / name)) == DOCUMENTS


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
            list(documents_of(tmp_path / name))


@pytest.mark.parametrize("name", ["text.txt", "text.xz"])
def test_binary_data_are_named_by_file_and_line(tmp_path, name):
    content = TEXT.encode() * 1000 + b"\n\xff\x00\n" + TEXT.encode() * 1000
    (tmp_path / name).write_bytes(lzma.compress(content) if name.endswith(".xz") else content)
    line = 1000 * TEXT.count("\n") + 2
    with pytest.raises(DataError, match=rf"{name}, line {line}: is not UTF-8 text \(invalid start byte\)"):
        list(documents_of(tmp_path / name))


@pytest.mark.parametrize("total_tokens", [768, 10**6])
def test_a_run_reads_the_first_tokens_of_its_text(tmp_path, monkeypatch, total_tokens):
    monkeypatch.setattr(source, "BATCH_DOCUMENTS", 3)
    recipe, folder, corpus = small_recipe(f"total_tokens={total_tokens}"), tmp_path / "run", tmp_path / "corpus.txt"
    folder.mkdir()
    small_corpus(corpus)
    tokenizer, stream = prepare_text(recipe, corpus, folder)
    whole = source.encode(list(documents_of(corpus)), tokenizer)
    expected = [*whole, tokenizer.eos_token_id][: total_tokens + 1]
    for found in (stream, prepare_text(recipe, corpus, folder)[1]):
        assert np.array_equal(found.tokens, expected)
    assert {path.name for path in folder.iterdir()} == {"tokenizer", "tokens.npy", "text.json"}


class OneTokenAWord:
    """A fake tokenizer, so the test measures only the memory for files."""

    eos_token_id = 0

    def __len__(self) -> int:
        return 300

    def __call__(self, documents: list[str], **_: object) -> dict[str, list[list[int]]]:
        return {"input_ids": [[1] * document.count(" ") for document in documents]}


def test_memory_does_not_grow_with_the_corpus(tmp_path, monkeypatch):
    monkeypatch.setattr(source, "BATCH_CHARACTERS", 2**16)
    peaks = [peak_bytes(tmp_path / f"{megabytes}.txt", megabytes) for megabytes in (1, 6)]
    assert peaks[1] < 1.2 * peaks[0] + 2**18 < 3e6


def peak_bytes(path: Path, megabytes: int) -> int:
    """Return Python's peak memory while a text is tokenized."""
    with path.open("w", encoding="utf-8") as file:
        for number in range(500 * megabytes):
            file.write(f"Tale {number}: {'the old fox ran ' * 125}\n<|endoftext|>\n")
    tracemalloc.start()
    tokenizer = cast(PreTrainedTokenizerFast, OneTokenAWord())
    write_tokens(documents_of(path), tokenizer, 10**9, path.with_suffix(".npy"))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak
