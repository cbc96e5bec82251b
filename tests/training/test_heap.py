"""Freed memory, kept: in a process of its own, since it is the process's setting."""

import subprocess
import sys

import pytest

RESIDENT = """
import sys
import torch
from nvium_core.training.heap import keep_freed_memory

def resident_pages():
    return int(open("/proc/self/statm").read().split()[1])

if sys.argv[1] == "keep" and not keep_freed_memory():
    sys.exit("no glibc")
before = resident_pages()
block = torch.ones(2**24)
held = resident_pages() - before
del block
print((resident_pages() - before) / held)
"""


def share_kept(way: str) -> float:
    """How much of 64 MiB a process still has after freeing them."""
    done = subprocess.run([sys.executable, "-c", RESIDENT, way], capture_output=True, text=True, check=False)
    if "no glibc" in done.stderr:
        pytest.skip("this system's allocator is not glibc's")
    return float(done.stdout)


def test_freed_memory_stays_with_a_process_that_keeps_it() -> None:
    assert share_kept("keep") > 0.9
    assert share_kept("give back") < 0.5
