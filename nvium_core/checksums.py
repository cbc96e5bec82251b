"""Checksums of cached files, so that a damaged cache is detected."""

import json
import mmap
import os
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from nvium_core.errors import NviumError

PIECE_BYTES = 2**24
CHECKSUMS_FILE = "checksums.json"


class DamagedFile(NviumError):
    """A file does not match its checksum, or the file of checksums is damaged."""


def checksum(file: Path) -> str:
    """Compute the CRC-32s of a file's pieces in parallel. Return the CRC-32 of these CRC-32s."""
    if not file.stat().st_size:
        return ""
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
        pieces = range(0, len(content), PIECE_BYTES)
        with ThreadPoolExecutor(os.cpu_count()) as pool, memoryview(content) as view:
            found = list(pool.map(lambda start: zlib.crc32(view[start : start + PIECE_BYTES]), pieces))
    return f"{zlib.crc32(repr(found).encode()):08x}"


def seal(folder: Path) -> None:
    """Write the checksums of all files in a folder, and flush these files to disk."""
    sums = {file.name: checksum(file) for file in sorted(folder.iterdir()) if file.is_file()}
    (folder / CHECKSUMS_FILE).write_text(json.dumps(sums))
    for name in (*sums, CHECKSUMS_FILE):
        sync(folder / name)


def sync(file: Path) -> None:
    with file.open("rb") as opened:
        os.fsync(opened.fileno())


def check(folder: Path) -> None:
    """Raise `DamagedFile` or `OSError` if a file of a sealed folder has changed or is missing."""
    try:
        sums = json.loads((folder / CHECKSUMS_FILE).read_bytes())
    except ValueError as error:
        raise DamagedFile(f"{CHECKSUMS_FILE} is not JSON") from error
    for name, expected in sums.items():
        if checksum(folder / name) != expected:
            raise DamagedFile(f"{name} does not match its checksum")
