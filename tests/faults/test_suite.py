"""Injects the quick faults once. `make faults` injects all faults several times."""

import asyncio
from pathlib import Path

import pytest

from tests.faults.kinds import KINDS
from tests.faults.suite import Suite, is_as_promised


@pytest.fixture(scope="module")
def suite(model_folder: Path) -> Suite:
    suite = Suite(model_folder, seed=7)
    asyncio.run(suite.prepare())
    return suite


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.is_quick], ids=lambda kind: kind.name)
async def test_responses_after_a_fault_equal_an_idle_servers(suite, kind):
    if missing := kind.missing():
        pytest.skip(missing)
    row = await suite.inject(kind, times=1)
    assert is_as_promised(row, kind), row
    assert row.right > 0
