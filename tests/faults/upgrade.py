"""`python -m tests.faults.upgrade COMMIT [--json FILE]`: from a commit to this working tree and back, under load.

Asked are known requests that both versions answer alike. The folders of the model and of what was measured are shared.
A training run is then begun by the one and gone on with by the other, both ways. One that refuses the other's
is told to accept the changes that it names.
"""

import argparse
import asyncio
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from tests.byte_model import NAME, load_byte_model
from tests.faults.load import OPTIONS, Known, Spoken, dumped, known_requests, quiet_answers
from tests.faults.rolling import Start, moves
from tests.server.server_process import server_process

ROOT = Path(__file__).parents[2]
NUM_KNOWN = 20
STEPS = 3

TRAINING = f"""
import sys
from pathlib import Path
from nvium_core.training.errors import TrainingError
from tests.training.small_runs import advance, options, small_recipe, start
folder, refusal = Path(sys.argv[1]), ""
try:
    run = start(small_recipe(), options(folder))
except TrainingError as error:
    refusal = f", refused before: {{error}}"
    run = start(small_recipe(), options(folder, accept_changes=True))
begun = run.step
advance(run, {STEPS})
run.save()
print(f"went on from step {{begun}}{{refusal}}")
"""


def code_variables(code: Path) -> dict[str, str]:
    """With which Python takes the code of that folder, and not of the current one."""
    return {"PYTHONPATH": str(code), "PYTHONSAFEPATH": "1"}


def answers_alike(answers: Sequence[dict[Known, Spoken]]) -> dict[Known, Spoken]:
    first, *others = answers
    return {known: spoken for known, spoken in first.items() if all(other[known] == spoken for other in others)}


def served(codes: Sequence[Path], folder: Path, seed: int) -> dict[str, Any]:
    starts: list[Start] = []
    for number, code in enumerate([*codes, codes[0]]):
        (logs := folder / str(number)).mkdir()
        variables = code_variables(code) | {"NVIUM_CALIBRATIONS": str(folder / "calibrations")}
        starts.append(partial(server_process, folder / NAME, logs, variables=variables, **OPTIONS))
    answers = []
    known = known_requests(NUM_KNOWN, random.Random(seed))
    for start in starts[:2]:
        with start() as server:
            answers.append(asyncio.run(quiet_answers(server.url, known)))
    alike = answers_alike(answers)
    rows = [asdict(move) for move in asyncio.run(moves(starts, alike))]
    return {"asked": len(known), "alike": len(alike), "rows": rows}


def trained(codes: Sequence[Path], folder: Path) -> list[str]:
    """What each says of a run's folder that the one before it has left, from new to old and back."""
    told = []
    for code in [*codes, *codes]:
        command = [sys.executable, "-c", TRAINING, str(folder / "run")]
        environment = os.environ | code_variables(code)
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        told.append((done.stdout or done.stderr).strip().splitlines()[-1].replace(str(folder), ""))
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("commit")
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model, codes = load_byte_model(), [folder / "before", ROOT]
        model.model.save_pretrained(folder / NAME)
        model.tokenizer.save_pretrained(folder / NAME)
        codes[0].mkdir()
        archive = subprocess.run(["git", "archive", given.commit], cwd=ROOT, check=True, capture_output=True).stdout
        subprocess.run(["tar", "-x", "-C", codes[0]], input=archive, check=True)
        told = served(codes, folder, given.seed) | {"training": trained(codes, folder)}
    sys.stdout.write(dumped(told))
    if given.json:
        given.json.write_text(dumped({"command": f"python -m tests.faults.upgrade {given.commit}", **told}))
    sys.exit(any(row["wrong"] or row["lost"] or row["failed"] for row in told["rows"]))


if __name__ == "__main__":
    main()
