"""One quick case of each kind of fault; `make faults` has all of them, more than once."""

import random
from pathlib import Path

import pytest

from tests.faults.catalogue import KINDS
from tests.faults.kinds import Kind
from tests.faults.suite import Suite, is_as_promised


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.is_quick], ids=lambda kind: kind.name)
async def test_what_survives_a_fault_is_answered_as_by_a_quiet_server(model_folder: Path, kind: Kind) -> None:
    if lacking := kind.needs():
        pytest.skip(lacking)
    suite = Suite(model_folder, seed=random.Random(kind.name).randrange(1000))
    await suite.prepare()
    row = await suite.broken(kind, times=1)
    assert is_as_promised(row, kind), row
    assert row.right > 0
