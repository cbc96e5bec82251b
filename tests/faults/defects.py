"""`python -m tests.faults.defects [--json FILE]`: defects found from outside, and whether their tests find them.

The tests of the commit that mended a defect run on the code before it, adapted to how that is called, then today's
tests of those names on the working tree.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.faults.load import dumped
from tests.faults.upgrade import code_variables

ROOT = Path(__file__).parents[2]
TEST_SECONDS = "120"


@dataclass(frozen=True)
class Defect:
    """`tests` is a file under tests/, `names` an expression for pytest's -k.

    `adapted`: by the names of files under tests/, what to put for which words, so that the tests run on code that did
    not have all they import.
    """

    what: str
    commit: str
    tests: str
    names: str
    adapted: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


NEVER_EXCLUDED = {"excluded: Collection[str]) ->": "excluded: Collection[str] = ()) ->"}
LAUNCH = "server/replicas/test_launch.py"
RELAY = "server/replicas/test_relay.py"
WITHOUT_A_WATCH = {
    "server/replicas/scripted.py": NEVER_EXCLUDED,
    RELAY: {
        **NEVER_EXCLUDED,
        "from server.replicas.relay import CHOOSING_SECONDS\n": "CHOOSING_SECONDS = 3\n",
        "from server.replicas.watch import ANSWER_SECONDS, PERIOD_SECONDS\n": "ANSWER_SECONDS, PERIOD_SECONDS = 2, 1\n",
    },
}
WITHOUT_A_ROOM = {
    "from server.http.listener import Listener\n": "",
    "from server.http.room import RESERVE, Room, room_for\n": "Room = object\n",
}
WITHOUT_A_SINK = {
    "from server.telemetry.sink import sink\n": "",
    "sink.drain(WRITTEN_SECONDS)": "pass",
}
WITHOUT_A_DIGEST = {
    "from nvium_core.training.checkpoint import PREVIOUS, STATE, is_intact, loaded, read_state, write_state\n": """
from nvium_core.training.checkpoint import read_state, write_state

STATE = "state.pt"


def loaded(path):
    return torch.load(path, weights_only=True)


def is_intact(path):
    try:
        return bool(read_state(path.parent))
    except TrainingError:
        return False

""",
    r"damaged \(its digest": "damaged",
}
WITHOUT_A_REAPER = {
    "from server.replicas.reaper import named, reaper_of\n": "named = reaper_of = None\n",
    "from server.replicas.reaper import reaper_of\n": "",
    "with reaper_of(sys.argv[1]):\n": "if True:\n",
}

DEFECTS = (
    Defect(
        "descriptors run out without a key",
        "ea38853",
        "server/http/test_descriptors.py",
        "probe or raised",
        {"server/http/test_descriptors.py": WITHOUT_A_ROOM},
    ),
    Defect("a full disk or a dead log breaks drains", "38298bc", "faults/test_endings.py", "full_disk or asleep"),
    Defect("a dead device thread does not end the process", "38298bc", "faults/test_endings.py", "dead_device"),
    Defect("a hung replica fails requests", "79c6be9", RELAY, "replica_that_hangs", WITHOUT_A_WATCH),
    Defect(
        "a costly expression is a 500",
        "38298bc",
        "server/generation/test_structured_outputs.py",
        "costs_too_much_to_follow",
        {"server/log_lines.py": WITHOUT_A_SINK},
    ),
    Defect("damaged models load, or end in tracebacks", "38298bc", "model/test_damaged_models.py", "refused"),
    Defect(
        "damaged checkpoints load",
        "ec2d8cd",
        "training/test_checkpoint.py",
        "flipped or truncated or tensors",
        {"training/test_checkpoint.py": WITHOUT_A_DIGEST},
    ),
    Defect("requests that outlast a drain get 500", "38298bc", "faults/test_endings.py", "outlast_a_drain"),
    Defect("dead for a moment after SIGCONT", "79c6be9", "faults/test_endings.py", "stopped_and_continued"),
    Defect("ambiguous heads are taken", "38298bc", "server/http/test_parser.py", "proxy_may_read"),
    Defect(
        "Ray's processes outlive a killed front",
        "79c6be9",
        LAUNCH,
        "killed_front",
        {LAUNCH: WITHOUT_A_REAPER},
    ),
    Defect("a request that kills replicas goes on to others", "79c6be9", RELAY, "were_lost", WITHOUT_A_WATCH),
    Defect("replicas without GPUs wait for ever", "79c6be9", LAUNCH, "gpus", {LAUNCH: WITHOUT_A_REAPER}),
)


@contextmanager
def before(defect: Defect) -> Iterator[Path]:
    """The code before it was mended, with the tests of the commit that did."""
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "code"
        git("worktree", "add", "--quiet", "--detach", str(folder), f"{defect.commit}^")
        try:
            git("-C", str(folder), "checkout", "--quiet", defect.commit, "--", "tests")
            for name, words in defect.adapted.items():
                adapt(folder / "tests" / name, words)
            yield folder
        finally:
            git("worktree", "remove", "--force", str(folder))


def adapt(file: Path, words: Mapping[str, str]) -> None:
    text = file.read_text()
    for found, put in words.items():
        assert found in text, f"{file.name} has no {found!r}"
        text = text.replace(found, put)
    file.write_text(text)


def git(*arguments: str) -> None:
    subprocess.run(["git", *arguments], cwd=ROOT, check=True)


def outcomes(code: Path, defect: Defect) -> dict[str, int]:
    """How many tests passed and failed; an error is of a file that could not be collected, or of a fixture."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0", "-m", "slow or not slow"]
    command += [f"--timeout={TEST_SECONDS}", f"tests/{defect.tests}", "-k", defect.names]
    variables = os.environ | code_variables(code)
    told = subprocess.run(command, cwd=code, env=variables, capture_output=True, text=True, check=False).stdout
    counts = {name: int(number) for number, name in re.findall(r"(\d+) (passed|failed|error)", told.splitlines()[-1])}
    return {name: counts.get(name, 0) for name in ("passed", "failed", "error")}


def is_shown(passed: int, failed: int, error: int) -> bool:
    """By a test that failed, or by all that could not run."""
    return failed > 0 or (error > 0 and passed == 0)


def examined(defect: Defect) -> dict[str, Any]:
    with before(defect) as code:
        then = outcomes(code, defect)
    now = outcomes(ROOT, defect)
    row = {
        "what": defect.what,
        "commit": defect.commit,
        "tests": defect.tests,
        "names": defect.names,
        "before": then,
        "now": now,
    }
    sys.stderr.write(f"{row}\n")
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="defects whose names hold this")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rows = [examined(defect) for defect in DEFECTS if given.only in defect.what]
    if given.json:
        given.json.write_text(dumped({"command": "python -m tests.faults.defects", "rows": rows}))
    sys.exit(not all(is_shown(**row["before"]) and not is_shown(**row["now"]) for row in rows))


if __name__ == "__main__":
    main()
