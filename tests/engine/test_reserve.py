"""The reserve under a real bound on a process's memory."""

import multiprocessing
import re
import resource
from pathlib import Path

import pytest

from nvium_core.engine.reserve import MemoryReserve

MEGABYTE = 2**20


def writable_bytes() -> int:
    [kilobytes] = re.findall(r"^VmData:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(kilobytes) * 1024


def run_out_of_memory_with_a_reserve() -> None:
    reserve = MemoryReserve(64 * MEGABYTE)
    reserve.take()
    resource.setrlimit(resource.RLIMIT_DATA, (writable_bytes() + MEGABYTE, resource.RLIM_INFINITY))
    with pytest.raises(MemoryError):
        bytearray(32 * MEGABYTE)
    reserve.note(ValueError("something else"))
    with pytest.raises(MemoryError) as out:
        bytearray(32 * MEGABYTE)
    reserve.note(out.value)
    told = bytearray(32 * MEGABYTE)
    reserve.take()  # there is too little for it now
    with pytest.raises(MemoryError):
        bytearray(64 * MEGABYTE)
    del told
    reserve.take()
    with pytest.raises(MemoryError):
        bytearray(32 * MEGABYTE)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_what_was_put_by_can_be_had_once_there_is_no_other_memory() -> None:
    process = multiprocessing.get_context("spawn").Process(target=run_out_of_memory_with_a_reserve)
    process.start()
    process.join()
    assert process.exitcode == 0


def test_it_takes_no_memory_that_anybody_else_could_use() -> None:
    resident = re.compile(r"^RssAnon:\s+(\d+) kB$", re.MULTILINE)
    before = int(resident.findall(Path("/proc/self/status").read_text())[0])
    reserve = MemoryReserve(256 * MEGABYTE)
    reserve.take()
    assert int(resident.findall(Path("/proc/self/status").read_text())[0]) < before + 64 * 1024
    reserve.give_back()


def test_what_is_spent_is_not_taken_again() -> None:
    reserve = MemoryReserve(256 * MEGABYTE)
    reserve.take()
    reserve.spend()
    before = writable_bytes()
    reserve.take()
    assert writable_bytes() < before + 128 * MEGABYTE
