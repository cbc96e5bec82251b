import json
import shlex
import sys
from pathlib import Path

import pytest

from loadtest.ready import NeverReady, main, started

SLOW = """
import time
print("starting", flush=True)
time.sleep(0.3)
held = b"x" * 40_000_000
print("Ready.", flush=True)
time.sleep(60)
"""
QUICK = "print(1, 'ready')"


def python(code: str) -> str:
    return shlex.join([sys.executable, "-c", code])


def test_seconds_and_memory_are_taken_when_the_word_is_said(tmp_path: Path) -> None:
    commands = [f"ours={python(SLOW)}", f"quick={python(QUICK)}"]
    main([*commands, "--turns", "1", "--json", str(tmp_path / "ready.json")])
    ours, quick = json.loads((tmp_path / "ready.json").read_text())["rows"]
    assert (ours["name"], quick["name"]) == ("ours", "quick")
    assert 0.3 < ours["warm"]["seconds"] < 60
    if sys.platform == "linux":
        assert 0 < ours["warm"]["processor"] < ours["warm"]["seconds"] + 0.1
        assert ours["warm"]["peak"] >= ours["warm"]["resident"] > 40_000_000


def test_a_command_that_ends_before_is_an_error() -> None:
    with pytest.raises(NeverReady, match="its last words: no"):
        started(python("print('no')"))
