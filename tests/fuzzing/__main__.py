"""`python -m tests.fuzzing [--seconds 60] [--only NAME] [--json FILE]`: coverage-guided fuzzing of all targets.

Uses atheris and libFuzzer. Starts from each target's seeds and from tests/fuzzing/corpus. Writes findings, and a corpus
that later hunts continue from, to --folder.
"""

import argparse
import sys
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

from nvium_core.bench.figures import write_json
from tests.faults.suite import table
from tests.fuzzing.campaign import TARGETS, Campaign


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60, help="duration per target")
    parser.add_argument("--only", help="targets whose names contain this")
    parser.add_argument("--folder", type=Path, default=Path(".fuzzing"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--keep", action="store_true", help="add inputs with new coverage to the corpus")
    given = parser.parse_args()
    if find_spec("atheris") is None:
        sys.stdout.write("NOT FUZZED: atheris is not installed (it supports Linux on x86-64)\n")
        return
    campaigns = [Campaign(name, given.folder / name) for name in TARGETS if (given.only or "") in name]
    hunts = [campaign.hunt(given.seconds) for campaign in campaigns]
    sys.stdout.write(table(hunts))
    if given.keep:
        for campaign in campaigns:
            campaign.keep()
    if given.json:
        write_json({"rows": [asdict(hunt) for hunt in hunts]}, given.json)
    sys.exit(any(hunt.findings for hunt in hunts))


if __name__ == "__main__":
    main()
