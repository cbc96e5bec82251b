"""Streams the documents of a folder of files, or of one large file; never all in memory.

Files end in .txt (documents separated by `<|endoftext|>` lines), .jsonl or .json (an object with `text` a line, as in
C4), or .parquet (a column `text`); all but the last may be compressed, .gz, .xz or .zst. Knows no tokens.
"""

import gzip
import json
import lzma
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from io import TextIOWrapper
from pathlib import Path
from typing import IO, Any

from nvium_core.training.data.documents import END_OF_TEXT, DataError, read_documents

FIELD = "text"
BATCH_ROWS = 1024
"""Rows of a parquet file in memory at once."""


def is_corpus(path: Path) -> bool:
    """Whether a text is streamed: a folder, or a file other than plain or .xz text."""
    return path.is_dir() or kind(path) in READERS.keys() - {".txt"} or path.suffix in (".gz", ".zst")


def corpus_files(path: Path) -> list[Path]:
    """Sorted by name. Raises `DataError` if there are none."""
    files = (
        [path]
        if path.is_file()
        else sorted(each for each in path.rglob("*") if kind(each) in READERS and each.is_file())
    )
    if not files:
        raise DataError(f"{path}: no files ending in {', '.join(READERS)}, plain or .gz, .xz, .zst")
    return files


def documents_of(path: Path) -> Iterable[str]:
    """Documents, one by one for a corpus, all at once for a text. Raises `DataError` naming what cannot be read."""
    return stream_documents(path) if is_corpus(path) else read_documents(path)


def stream_documents(path: Path) -> Iterator[str]:
    """Every non-empty document. Raises `DataError` naming the file and line that cannot be read."""
    for file in corpus_files(path):
        yield from file_documents(file)


def file_documents(file: Path) -> Iterator[str]:
    try:
        yield from (text for document in READERS[kind(file)](file) if (text := document.strip("\n")))
    except DataError:
        raise
    except Exception as error:  # whatever the formats' libraries make of damaged files
        raise DataError(f"{file}: {getattr(error, 'strerror', None) or error}") from error


def kind(path: Path) -> str:
    """The file's type by its suffix, without that of its compression."""
    return (path.with_suffix("") if path.suffix in OPENERS else path).suffix


def read_text(path: Path) -> Iterator[str]:
    lines = list[str]()
    for line in opened(path):
        if line.rstrip("\r\n") == END_OF_TEXT:
            yield "".join(lines)
            lines.clear()
        else:
            lines.append(line)
    yield "".join(lines)


def read_json_lines(path: Path) -> Iterator[str]:
    for number, line in enumerate(opened(path), 1):
        if line.strip():
            yield field_of(json.loads(line), f"{path}, line {number}")


def read_parquet(path: Path) -> Iterator[str]:
    file = optional("pyarrow.parquet").ParquetFile(path)
    if FIELD not in file.schema_arrow.names:
        raise DataError(f"{path}: no column {FIELD!r}")
    for batch in file.iter_batches(BATCH_ROWS, columns=[FIELD]):
        yield from (field_of({FIELD: value}, str(path)) for value in batch.column(0).to_pylist())


def field_of(row: Any, place: str) -> str:
    if not (isinstance(row, dict) and isinstance(row.get(FIELD), str)):
        raise DataError(f"{place}: not an object with a {FIELD!r}")
    text: str = row[FIELD]
    return text


def opened(path: Path) -> Iterable[str]:
    """The lines of a file."""
    with OPENERS.get(path.suffix, Path.open)(path, "rb") as file, TextIOWrapper(file, encoding="utf-8-sig") as lines:
        yield from lines


def open_zst(path: Path, mode: str) -> IO[bytes]:
    found: IO[bytes] = optional("zstandard").open(path, mode)
    return found


def optional(name: str) -> Any:
    """A library that only some files need."""
    try:
        return import_module(name)
    except ImportError as error:
        raise DataError(f"{error}: pip install 'nvium[corpus]'") from error


OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open, ".zst": open_zst}
READERS: dict[str, Callable[[Path], Iterator[str]]] = {
    ".txt": read_text,
    ".jsonl": read_json_lines,
    ".json": read_json_lines,
    ".parquet": read_parquet,
}
