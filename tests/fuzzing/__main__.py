"""`python -m tests.fuzzing [--seconds 60] [--only NAME] [--json FILE]`: looks for inputs that break what reads them.

Guided by coverage (atheris and libFuzzer), from the seeds of each target and what earlier hunts have found, in
tests/fuzzing/corpus. Findings, and a working corpus that a later hunt goes on from, are left in --folder.
"""

import argparse
import sys
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

from tests.faults.load import dumped
from tests.faults.suite import table
from tests.fuzzing.campaign import TARGETS, Campaign


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60, help="for each target")
    parser.add_argument("--only", help="targets whose names hold this")
    parser.add_argument("--folder", type=Path, default=Path(".fuzzing"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--keep", action="store_true", help="put what covers something new into the corpus")
    given = parser.parse_args()
    if find_spec("atheris") is None:
        sys.stdout.write("NOT FUZZED: atheris is not installed, which has builds for Linux on x86-64\n")
        return
    campaigns = [Campaign(name, given.folder / name) for name in TARGETS if (given.only or "") in name]
    hunts = [campaign.hunt(given.seconds) for campaign in campaigns]
    sys.stdout.write(table(hunts))
    if given.keep:
        for campaign in campaigns:
            campaign.keep()
    if given.json:
        command = f"python -m tests.fuzzing --seconds {given.seconds:g}"
        given.json.write_text(dumped({"command": command, "rows": [asdict(hunt) for hunt in hunts]}))
    sys.exit(any(hunt.findings for hunt in hunts))


if __name__ == "__main__":
    main()
