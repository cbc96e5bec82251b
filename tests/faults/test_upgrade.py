"""From one server to the next behind one address, streams in flight: no request is lost. In CI both are the same."""

import random
from functools import partial
from pathlib import Path

import pytest

from tests.faults.load import OPTIONS, known_requests, quiet_answers
from tests.faults.rolling import moves
from tests.server.forked_server import forked_server

NUM_KNOWN = 8


@pytest.mark.slow
async def test_a_server_gives_way_to_another_and_that_to_a_third_without_a_lost_request(
    model_folder: Path, tmp_path: Path
) -> None:
    starts = [partial(forked_server, model_folder, tmp_path / f"log-{number}", **OPTIONS) for number in range(3)]
    with starts[0]() as server:
        expected = await quiet_answers(server.url, known_requests(NUM_KNOWN, random.Random(8)))
    upgrade, rollback = await moves(starts, expected)
    for move in (upgrade, rollback):
        assert (move.wrong, move.lost, move.failed, move.exit_code) == (0, 0, 0, 0)
        assert move.right > NUM_KNOWN
