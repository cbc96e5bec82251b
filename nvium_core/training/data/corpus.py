"""Stream the documents of a file: UTF-8 text, plain or .xz, with `<|endoftext|>` lines between documents."""

import lzma
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import BinaryIO, cast

from nvium_core.training.errors import DataError

END_OF_TEXT = "<|endoftext|>"


def documents_of(path: Path) -> Iterator[str]:
    """Stream the non-empty documents of a file. Raise `DataError` if there are none or the file is damaged."""
    is_empty, document = True, list[str]()
    for line in chain(lines_of(path), [END_OF_TEXT]):
        if line.rstrip("\n") != END_OF_TEXT:
            document.append(line)
            continue
        if text := "".join(document).strip("\n"):
            is_empty = False
            yield text
        document.clear()
    if is_empty:
        raise DataError(f"{path}: no documents")


def lines_of(path: Path) -> Iterator[str]:
    """Stream the lines of a file, plain or .xz. Raise `DataError` for a damaged file, or a line that is not UTF-8."""
    number = 0
    try:
        with cast(BinaryIO, lzma.open(path)) if path.suffix == ".xz" else path.open("rb") as file:
            for number, line in enumerate(file, 1):
                yield line.decode("utf-8-sig" if number == 1 else "utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}, line {number}: is not UTF-8 text ({error.reason})") from error
    except (OSError, lzma.LZMAError, EOFError) as error:
        raise DataError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
