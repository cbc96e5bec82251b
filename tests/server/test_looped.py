"""A looped model over HTTP: its card, and the end of its chats."""

from collections.abc import Iterator

import pytest

from nvium_core import load_model
from tests.model.looped_folders import FIXTURES
from tests.server.live_server import LiveServer, live_server

pytestmark = pytest.mark.skipif(not FIXTURES.is_dir(), reason="no fixtures of looped models next to this checkout")

IM_END = 2

CARDS = {"ouro-4x3": (3, 4, [3, 6, 9, 12]), "ouro-2x2-gqa": (2, 2, [2, 4])}
CARDS |= {"nanbeige-2x3": (3, 2, [6]), "nanbeige-3x2-skip-norm": (2, 3, [6])}


@pytest.fixture(scope="module", params=CARDS)
def looped(request: pytest.FixtureRequest) -> Iterator[LiveServer]:
    with live_server(load_model(str(FIXTURES / request.param))) as server:
        yield server


def test_the_card_counts_depth_in_layer_calls(looped):
    card = looped.client().models.retrieve("default").model_dump()["nvium"]
    assert (card["num_layers"], card["num_loops"], card["exit_layers"]) == CARDS[looped.service.name]


def test_end_of_turn_and_end_of_text_end_a_chat(looped):
    for token_id in {IM_END, *looped.service.engine.limits.end_token_ids}:
        answer = looped.chat(model="default", logit_bias={str(token_id): 100}, max_tokens=5).json()
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["usage"]["completion_tokens"] == 1
