"""Stream the documents of a folder or file.

Files are UTF-8: .txt (with a line `<|endoftext|>` between documents), or .jsonl or .json (one object with `text` per
line, as in C4). They may be compressed as .gz or .xz.
"""

import gzip
import json
import lzma
from collections.abc import Callable, Iterable, Iterator
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from nvium_core.training.data.documents import END_OF_TEXT, DataError

FIELD = "text"
UNSUPPORTED = {".parquet", ".zst"}


def corpus_files(path: Path) -> list[Path]:
    """Return a folder's text files sorted by path, or the path itself if it is a file.

    Raise `DataError` if the folder contains no text files, or if a file's format is not supported.
    """
    files = sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path]
    for file in files:
        if file.suffix in UNSUPPORTED:
            raise DataError(f"{file}: {file.suffix} files are not supported; convert it to .jsonl or .jsonl.xz")
    texts = [each for each in files if kind(each) in READERS] if path.is_dir() else files
    if not texts:
        raise DataError(f"{path}: no {', '.join(READERS)} files, uncompressed or with .gz or .xz appended")
    return texts


def read_documents(path: Path) -> list[str]:
    return list(documents_of(path))


def documents_of(path: Path) -> Iterator[str]:
    """Stream the non-empty documents of a file or folder. Raise `DataError` if there are none or a file is damaged."""
    is_empty = True
    for file in corpus_files(path):
        for document in file_documents(file):
            is_empty = False
            yield document
    if is_empty:
        raise DataError(f"{path}: no documents")


def file_documents(file: Path) -> Iterator[str]:
    try:
        yield from (text for document in READERS.get(kind(file), read_text)(file) if (text := document.strip("\n")))
    except DataError:
        raise
    except Exception as error:  # decompressors raise many types of exceptions for damaged files
        raise DataError(f"{file}: {getattr(error, 'strerror', None) or error}") from error


def kind(path: Path) -> str:
    """Return the file's suffix without .gz or .xz, such as `.txt` for books.txt.gz."""
    return (path.with_suffix("") if path.suffix in OPENERS else path).suffix


def read_text(path: Path) -> Iterator[str]:
    document = list[str]()
    for line in lines_of(path):
        if line.rstrip("\n") == END_OF_TEXT:
            yield "".join(document)
            document.clear()
        else:
            document.append(line)
    yield "".join(document)


def read_json_lines(path: Path) -> Iterator[str]:
    for number, line in enumerate(lines_of(path), 1):
        if line.strip():
            yield field_of(json.loads(line), f"{path}, line {number}")


def field_of(row: Any, place: str) -> str:
    if not (isinstance(row, dict) and isinstance(row.get(FIELD), str)):
        raise DataError(f"{place}: must be an object with a string {FIELD!r}")
    text: str = row[FIELD]
    return text


def lines_of(path: Path) -> Iterable[str]:
    with OPENERS.get(path.suffix, Path.open)(path, "rb") as file, TextIOWrapper(file, encoding="utf-8-sig") as lines:
        yield from lines


OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open}
READERS: dict[str, Callable[[Path], Iterator[str]]] = {
    ".txt": read_text,
    ".jsonl": read_json_lines,
    ".json": read_json_lines,
}
