import lzma
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from nvium_core.training.data import encoding
from nvium_core.training.data.corpus import documents_of, read_documents
from nvium_core.training.data.source import prepare_text
from nvium_core.training.data.tokens import write_tokens
from nvium_core.training.errors import DataError, TrainingError
from nvium_core.training.train import train
from tests.training.small_runs import options, small_folder, small_recipe

DOCUMENTS = ["One fox.", "Two hens.\n\nThey went home.", "Thrée."]
TEXT = "\n<|endoftext|>\n".join(DOCUMENTS) + "\n"


@pytest.mark.parametrize(("name", "content"), [("a.txt", TEXT.encode()), ("a.txt.xz", lzma.compress(TEXT.encode()))])
def test_plain_and_compressed_files_give_the_same_documents(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    assert list(documents_of(tmp_path / name)) == DOCUMENTS
    assert list(documents_of(tmp_path)) == DOCUMENTS


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl.xz", "a.json.gz"])
def test_a_format_that_is_not_supported_is_refused_by_name(tmp_path, name):
    (tmp_path / name).write_bytes(b"")
    (tmp_path / "b.txt").write_text(TEXT, encoding="utf-8")
    for path in (tmp_path / name, tmp_path):
        with pytest.raises(DataError, match=rf"{name}: \.\w+ files are not supported; convert it to \.txt"):
            list(documents_of(path))


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return small_folder(tmp_path / "corpus")


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "BATCH_DOCUMENTS", 3)


@pytest.mark.parametrize("total_tokens", [768, 10**6])
def test_a_corpus_gives_the_first_tokens_of_one_file(corpus, tmp_path, small_parts, total_tokens):
    recipe, folder = small_recipe(f"total_tokens={total_tokens}"), tmp_path / "run"
    folder.mkdir()
    tokenizer, stream = prepare_text(recipe, corpus, folder)
    tokens = encoding.encode(read_documents(tmp_path / "corpus.txt"), tokenizer)
    expected = [*tokens, tokenizer.eos_token_id][: total_tokens + 1]
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
    monkeypatch.setattr(encoding, "BATCH_CHARACTERS", 2**16)
    peaks = [peak_bytes(tmp_path / str(megabytes), megabytes) for megabytes in (1, 6)]
    assert peaks[1] < 1.2 * peaks[0] + 2**18 < 3e6


def peak_bytes(folder: Path, megabytes: int) -> int:
    """Return Python's peak memory while a corpus of two files is tokenized."""
    folder.mkdir()
    for part in ("1", "2"):
        with (folder / f"{part}.txt").open("w", encoding="utf-8") as file:
            for number in range(250 * megabytes):
                file.write(f"Tale {number}: {'the old fox ran ' * 125}\n<|endoftext|>\n")
    tracemalloc.start()
    tokenizer = cast(PreTrainedTokenizerFast, OneTokenAWord())
    write_tokens(documents_of(folder), tokenizer, 10**9, folder / "tokens.npy")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def test_a_run_trains_on_a_corpus_and_does_not_resume_on_another(corpus, tmp_path):
    chosen = replace(options(tmp_path / "run"), data=corpus, validation=corpus)
    assert (train(small_recipe("total_tokens=512"), chosen) / "model.safetensors").exists()
    (corpus / "3.txt").write_text("One more.", encoding="utf-8")
    with pytest.raises(TrainingError, match="tokens were made with another data"):
        train(small_recipe("total_tokens=512"), chosen)
