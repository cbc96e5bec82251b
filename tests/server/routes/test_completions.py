import json

import pytest

from nvium_core import Engine, SamplingParams
from nvium_core.engine.schedule import scheduler
from tests.byte_model import EXIT_LAYERS, token_ids
from tests.server.live_server import wait_until
from tests.server.raw_client import Json, streamed


def test_best_of_ranks_by_mean_log_probability(server, byte_model):
    params = SamplingParams(max_tokens=10, seed=5, n=2, best_of=5)
    expected = Engine(byte_model.model).generate([token_ids("Once")], params)
    body = server.complete(max_tokens=10, seed=5, n=2, best_of=5).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert [choice["nvium"]["token_ids"] for choice in body["choices"]] == [c.token_ids for c in expected]
    assert sum(body["nvium"]["exit_counts"]) == sum(len(c.token_ids) for c in expected)
    assert body["usage"]["prompt_tokens"] == 4
    assert body["usage"]["completion_tokens"] > sum(body["nvium"]["exit_counts"])


def test_a_repeated_prompt_is_taken_from_the_cache(server):
    """With `mixture` the rows pass all blocks. An early exit may drop them, under the schedule `sweep`."""
    prompt = "A prompt that is long enough to fill more than a page of the cache."
    asked = {"prompt": prompt, "max_tokens": 6, "nvium": {"sampling": "mixture"}}
    first = server.complete(**asked).json()["choices"]
    before = server.gauge("nvium_cached_prompt_tokens_total")
    for _ in range(2):  # with two replicas, one of them has the prompt by then
        assert same(server.complete(**asked).json()["choices"][0]["nvium"], first[0]["nvium"])
    wait_until(lambda: server.gauge("nvium_cached_prompt_tokens_total") - before in (64, 128))


def same(first: Json, second: Json) -> bool:
    """Return whether the metadata are equal up to rounding, which depends on the batch."""
    return first == second | {"exit_probabilities": pytest.approx(second["exit_probabilities"])}


def test_every_sampling_field_reaches_the_engine_whose_tokens_and_exits_are_answered(server, byte_model):
    """Without any one of these fields the tokens are others."""
    asked = {"max_tokens": 20, "seed": 2, "temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.01}
    asked |= {"presence_penalty": 1.4, "frequency_penalty": -0.9, "repetition_penalty": 1.3, "min_tokens": 12}
    params = SamplingParams(**asked, logit_bias={101: 3.0})
    [expected] = Engine(byte_model.model).generate([token_ids("Once")], params)
    assert {*expected.exits} == {1, 2, 3}
    for prompt in ("Once", token_ids("Once")):
        body = server.complete(prompt=prompt, **asked, logit_bias={"101": 3}).json()
        served = body["choices"][0]["nvium"]
        assert served["token_ids"] == expected.token_ids
        assert served["exits"] == expected.exits
        assert served["exit_layers"] == [EXIT_LAYERS[number - 1] for number in expected.exits]
        assert served["exit_probabilities"] == pytest.approx(expected.exit_probabilities)
        depth = sum(served["exit_layers"]) / len(expected.exits) / EXIT_LAYERS[-1]
        assert body["nvium"]["mean_depth"] == pytest.approx(depth)


def test_a_prompt_in_a_list_and_choice_zero_behave_as_if_sent_alone(server):
    together = server.complete(prompt=["one", "two"], n=2, max_tokens=12).json()["choices"]
    for number, prompt in enumerate(["one", "two"]):
        alone = server.complete(prompt=prompt, max_tokens=12).json()["choices"][0]
        assert together[2 * number]["text"] == alone["text"]
        assert same(together[2 * number]["nvium"], alone["nvium"])
    assert together[0]["nvium"] != together[1]["nvium"]


def test_echo_returns_the_prompt_before_the_text(server):
    """A replacement character at the prompt's end is not part of the text."""
    for prompt in ("Oncé", "abc\ufffd"):
        plain = server.complete(prompt=prompt, max_tokens=9).json()["choices"][0]["text"]
        for given in (prompt, token_ids(prompt)):
            echoed = server.complete(prompt=given, max_tokens=9, echo=True).json()["choices"][0]["text"]
            assert echoed == prompt + plain


def test_generation_ends_with_the_token_that_completes_a_stop_string(server):
    free = server.complete(max_tokens=200, ignore_eos=True).json()["choices"][0]
    stop = next(character for character in free["text"][10:] if character.isascii())
    response = server.complete(max_tokens=200, ignore_eos=True, stop=stop).json()
    cut = response["choices"][0]
    assert cut["text"] == free["text"][: free["text"].index(stop)]
    assert cut["finish_reason"] == "stop"
    tokens = cut["nvium"]["token_ids"]
    assert tokens[-1] == token_ids(stop)[0]
    assert tokens == free["nvium"]["token_ids"][: len(tokens)]
    assert response["usage"]["completion_tokens"] == len(tokens)
    kept = server.complete(max_tokens=200, ignore_eos=True, stop=stop, include_stop_str_in_output=True).json()
    assert kept["choices"][0]["text"] == cut["text"] + stop
    by_token = server.complete(max_tokens=200, ignore_eos=True, stop_token_ids=token_ids(stop)).json()["choices"][0]
    assert by_token["finish_reason"] == "stop"
    assert by_token["nvium"]["token_ids"] == tokens
    later = server.complete(max_tokens=200, ignore_eos=True, stop=stop, min_tokens=len(tokens)).json()["choices"][0]
    assert later["nvium"]["token_ids"][: len(tokens)] == tokens
    assert len(later["nvium"]["token_ids"]) > len(tokens)


def test_usage_is_streamed_only_when_asked_for(server):
    assert not any("usage" in chunk for chunk in streamed(server.complete, max_tokens=4))
    *chunks, last = streamed(server.complete, max_tokens=4, ignore_eos=True, stream_options={"include_usage": True})
    assert [chunk["usage"] for chunk in chunks] == [None] * len(chunks)
    assert last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": 4,
        "completion_tokens": 4,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    options = {"include_usage": True, "continuous_usage_stats": True}
    counts = [
        c["usage"]["completion_tokens"]
        for c in streamed(server.complete, max_tokens=3, ignore_eos=True, stream_options=options)
    ]
    assert counts == sorted(counts)
    assert counts[-2:] == [3, 3]
    options = {"include_usage": False, "continuous_usage_stats": True}
    assert not any("usage" in chunk for chunk in streamed(server.complete, max_tokens=3, stream_options=options))


def test_metadata_and_token_ids_are_optional(server):
    body = server.complete(max_tokens=3, ignore_eos=True, nvium={"metadata": False}, return_token_ids=True).json()
    assert "nvium" not in body
    assert "nvium" not in body["choices"][0]
    assert body["choices"][0]["prompt_token_ids"] == token_ids("Once")
    chunks = streamed(server.complete, max_tokens=3, ignore_eos=True, return_token_ids=True)
    assert [chunk for chunk in chunks if "prompt_token_ids" in chunk["choices"][0]] == chunks[:1]


def test_probabilities_are_optional_and_change_no_token(server):
    asked = {"max_tokens": 20, "ignore_eos": True}
    [choice] = server.complete(**asked, nvium={"probabilities": True}).json()["choices"]
    metadata = choice["nvium"]
    assert choice["logprobs"] is None
    assert [sum(p_k) for p_k in metadata["probabilities"]] == pytest.approx([1.0] * 20)
    taken = [p_k[exit_ - 1] for p_k, exit_ in zip(metadata["probabilities"], metadata["exits"], strict=True)]
    assert taken == pytest.approx(metadata["exit_probabilities"])
    plain = server.complete(**asked).json()["choices"][0]["nvium"]
    assert "probabilities" not in plain
    assert plain["token_ids"] == metadata["token_ids"]


def test_a_token_whose_text_is_held_back_is_in_the_chunk_of_its_step(server, monkeypatch):
    monkeypatch.setattr(scheduler, "MULTI_STEP_SECONDS", 0.0)  # one token a Step

    def is_held_back() -> bool:
        """Return whether a chunk has no text. On a busy machine a chunk may contain the tokens of many Steps."""
        chunks = streamed(server.complete, max_tokens=40, ignore_eos=True)
        choices = [chunk["choices"][0] for chunk in chunks]
        assert all(choice["nvium"]["token_ids"] for choice in choices)
        assert sum(len(choice["nvium"]["token_ids"]) for choice in choices) == 40
        return "" in [choice["text"] for choice in choices]

    wait_until(is_held_back)


def test_unknown_fields_are_named_in_a_header_without_unsafe_characters(server):
    response = server.complete(max_tokens=1, **{"foo": 1, "x\r\nset-cookie: é": 2}, suffix=None)
    assert response.status_code == 200
    assert response.headers["x-nvium-ignored-params"] == "foo, x??set-cookie???"
    assert "x-nvium-ignored-params" not in server.complete(max_tokens=1).headers


@pytest.mark.parametrize("content_type", ["application/x-www-form-urlencoded", None, "application/json; charset=utf-8"])
def test_a_body_is_parsed_as_json_with_curls_content_types(server, content_type):
    headers = {"content-type": content_type} if content_type else {}
    body = json.dumps({"model": "default", "prompt": "Once", "max_tokens": 2}).encode()
    response = server.http.post("/v1/completions", content=body, headers=headers)
    assert response.status_code == 200
    assert response.json()["usage"]["completion_tokens"] >= 1


def test_equal_prompts_without_a_seed_get_different_tokens(server):
    first, second = server.complete(prompt=["Once", "Once"], max_tokens=20, seed=None).json()["choices"]
    assert first["nvium"]["token_ids"] != second["nvium"]["token_ids"]
