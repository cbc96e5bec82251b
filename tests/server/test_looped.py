"""A looped model over HTTP: its card, its tokens and exits, and the end of its chats."""

from collections.abc import Iterator

import pytest

from nvium_core import load_model
from tests.model.looped_folders import FIXTURES, OURO, expected_of
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


def test_completions_equal_the_public_implementation(looped):
    name, layers = looped.service.name, looped.service.exit_layers
    for prompt in expected_of(name)["prompts"]:
        last = prompt["positions"][-1]
        rules = {None: (prompt["greedy"], last)}  # without exits
        if name in OURO:
            rules = {q: (prompt["greedy"][q], last["threshold"][q]) for q in prompt["greedy"]}
            rules[None] = rules["1.0"]  # the default is the last loop
        for q, (tokens, first) in rules.items():
            rule = {"sampling": "threshold", "threshold": float(q)} if q else {}
            body = {"temperature": 0, "max_tokens": 12, "ignore_eos": True, "logprobs": 0, "nvium": rule}
            found = looped.complete(model="default", prompt=prompt["token_ids"], **body).json()
            [choice] = found["choices"]
            assert choice["nvium"]["token_ids"] == tokens
            assert choice["nvium"]["exits"][0] == first.get("exit_loop", 1)
            [logprob, *_] = choice["logprobs"]["token_logprobs"]
            assert logprob == pytest.approx(first["logprob_of_argmax"], abs=5e-5)
            depths = [layers[number - 1] for number in choice["nvium"]["exits"]]
            assert choice["nvium"]["exit_layers"] == depths
            assert found["nvium"]["mean_depth"] == pytest.approx(sum(depths) / len(depths) / layers[-1])
            assert q or found["nvium"]["mean_depth"] == 1


def test_end_of_turn_and_end_of_text_end_a_chat(looped):
    for token_id in {IM_END, *looped.service.engine.limits.end_token_ids}:
        answer = looped.chat(model="default", logit_bias={str(token_id): 100}, max_tokens=5).json()
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["usage"]["completion_tokens"] == 1
