"""`python -m tests.faults [--json FILE]`: injects faults into servers under load and prints a table of the outcomes."""

import argparse
import asyncio
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from nvium_core.bench.figures import write_json
from tests.byte_model import NAME, save_byte_model
from tests.faults.kinds import KINDS
from tests.faults.suite import Row, Suite, is_as_promised, table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=2, help="repetitions of each fault")
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("--only", help="faults whose names contain this")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = asyncio.run(inject(save_byte_model(Path(folder) / NAME), given.times, given.seed, given.only or ""))
    sys.stdout.write(table(rows))
    if given.json:
        seconds = round(sum(row.seconds for row in rows))
        write_json({"seconds": seconds, "rows": [asdict(row) for row in rows]}, given.json)
    kinds = {kind.name: kind for kind in KINDS}
    sys.exit(not all(is_as_promised(row, kinds[row.what]) for row in rows))


async def inject(model: Path, times: int, seed: int, only: str) -> list[Row]:
    suite = Suite(model, seed)
    await suite.prepare()
    rows = []
    for kind in (kind for kind in KINDS if only in kind.name):
        if missing := kind.missing():
            sys.stderr.write(f"{kind.name}: skipped, {missing}\n")
            continue
        rows.append(await suite.inject(kind, times))
        sys.stderr.write(f"{rows[-1]}\n")
    return rows


if __name__ == "__main__":
    main()
