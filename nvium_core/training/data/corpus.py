"""Stream the documents of a file or folder: UTF-8 text, plain or .xz, with `<|endoftext|>` lines between documents."""

import lzma
from collections.abc import Iterable, Iterator
from io import TextIOWrapper
from pathlib import Path
from typing import BinaryIO, cast

from nvium_core.training.errors import DataError

END_OF_TEXT = "<|endoftext|>"
SUFFIXES = (".txt", ".txt.xz")
UNSUPPORTED = {".gz", ".json", ".jsonl", ".parquet", ".zst"}


def corpus_files(path: Path) -> list[Path]:
    """Return a folder's text files sorted by path, or the path itself if it is a file.

    Raise `DataError` if the folder contains no text files, or if a file's format is not supported.
    """
    files = sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path]
    for file in files:
        if (suffix := Path(file.name.removesuffix(".xz")).suffix) in UNSUPPORTED:
            hint = f"convert it to .txt, plain or .xz, with a line {END_OF_TEXT} between documents"
            raise DataError(f"{file}: {suffix} files are not supported; {hint}")
    texts = [each for each in files if each.name.endswith(SUFFIXES)] if path.is_dir() else files
    if not texts:
        raise DataError(f"{path}: no {' or '.join(SUFFIXES)} files")
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
    document = list[str]()
    try:
        for line in lines_of(file):
            if line.rstrip("\n") != END_OF_TEXT:
                document.append(line)
                continue
            if text := "".join(document).strip("\n"):
                yield text
            document.clear()
    except (OSError, lzma.LZMAError, EOFError) as error:
        raise DataError(f"{file}: {getattr(error, 'strerror', None) or error}") from error
    if text := "".join(document).strip("\n"):
        yield text


def lines_of(path: Path) -> Iterable[str]:
    """Stream the lines of a file, plain or .xz. Raise `DataError` naming the first line that is not UTF-8 text."""
    try:
        with opened(path) as file, TextIOWrapper(file, encoding="utf-8-sig") as lines:
            yield from lines
    except UnicodeDecodeError as error:
        raise DataError(f"{path}, line {undecodable_line(path)}: is not UTF-8 text ({error.reason})") from error


def undecodable_line(path: Path) -> int:
    with opened(path) as file:
        return next(number for number, line in enumerate(file, 1) if not is_decodable(line))


def is_decodable(line: bytes) -> bool:
    try:
        line.decode()
    except UnicodeDecodeError:
        return False
    return True


def opened(path: Path) -> BinaryIO:
    return cast(BinaryIO, lzma.open(path)) if path.suffix == ".xz" else path.open("rb")
