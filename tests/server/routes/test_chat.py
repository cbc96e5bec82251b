import pytest

from nvium_core import Engine, SamplingParams
from tests.byte_model import END_OF_TEXT, NAME, token_ids
from tests.server.live_server import live_server, template_server, wait_until
from tests.server.log_lines import log_lines
from tests.server.raw_client import error_of, streamed

PROMPT = token_ids("User:\nHello\n\nAssistant:\n")


@pytest.mark.parametrize("n", [1, 2])
def test_the_clients_stream_helper_collects_the_exits_of_all_tokens(server, n):
    """OpenAI's helper raises if a response is cut at its length, so a regex ends this response."""
    asked = {"model": NAME, "messages": [{"role": "user", "content": "Hello"}], "seed": 3, "n": n}
    asked["extra_body"] = {"structured_outputs": {"regex": "[a-z]{8}"}}
    client = server.client(strict=False)
    whole = client.chat.completions.create(**asked)
    with client.chat.completions.stream(**asked) as stream:
        together = stream.get_final_completion()
    assert len(together.choices) == n
    for choice, expected in zip(together.choices, whole.choices, strict=True):
        exits = choice.message.model_extra["nvium"]
        assert len(exits["exits"]) >= 8
        assert exits["token_ids"] == expected.model_extra["nvium"]["token_ids"]
        assert exits["exit_probabilities"] == pytest.approx(expected.model_extra["nvium"]["exit_probabilities"])


def test_tokens_equal_the_engines_for_the_templates_prompt(server, byte_model):
    params = SamplingParams(max_tokens=20, seed=5, temperature=0.8, top_k=50, ignore_eos=True, sampling="mixture")
    [expected] = Engine(byte_model.model).generate([PROMPT], params)
    asked = {"max_tokens": 20, "seed": 5, "temperature": 0.8, "top_k": 50, "ignore_eos": True}
    body = server.chat(**asked, nvium={"sampling": "mixture"}, return_token_ids=True).json()
    assert body["prompt_token_ids"] == PROMPT
    assert body["choices"][0]["nvium"]["token_ids"] == body["choices"][0]["token_ids"] == expected.token_ids
    assert body["nvium"]["exit_counts"] == [0, 0, 20]


def test_a_stream_begins_with_roles_and_ends_each_choice_with_its_reason(server):
    chunks = streamed(server.chat, n=2, max_tokens=4, ignore_eos=True, return_token_ids=True)
    choices = [chunk["choices"][0] for chunk in chunks]
    opening = {"role": "assistant", "content": ""}
    assert [choice["delta"] for choice in choices[:2]] == [opening, opening]
    assert [choice["index"] for choice in choices[:2]] == [0, 1]
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["length", "length"]
    assert all("role" not in choice["delta"] for choice in choices[2:])
    assert [chunk.get("prompt_token_ids") for chunk in chunks] == [PROMPT] + [None] * (len(chunks) - 1)
    assert [number for number, chunk in enumerate(chunks) if "nvium" in chunk] == [len(chunks) - 1]
    assert sum(chunks[-1]["nvium"]["exit_counts"]) == 8
    assert "nvium" not in streamed(server.chat, max_tokens=3, nvium={"metadata": False})[-1]["choices"][0]["delta"]


def test_logprobs_of_partial_characters_contain_their_bytes(server):
    choice = server.chat(max_tokens=60, ignore_eos=True, logprobs=True, top_logprobs=3).json()["choices"][0]
    assert choice["logprobs"]["refusal"] is None
    entries = choice["logprobs"]["content"]
    assert [entry["bytes"] for entry in entries] == [
        list(END_OF_TEXT.encode()) if i == 0 else [i - 1] for i in choice["nvium"]["token_ids"]
    ]
    parts = [entry for entry in entries if entry["bytes"][0] >= 128]
    assert parts
    assert all(entry["token"] == f"bytes:\\x{entry['bytes'][0]:02x}" for entry in parts)
    assert {len(entry["top_logprobs"]) for entry in entries} == {3}
    for entry in entries:
        tops = [top["logprob"] for top in entry["top_logprobs"]]
        assert tops == sorted(tops, reverse=True)
        assert entry["logprob"] <= tops[0] + 1e-12
    alone = server.chat(max_tokens=3, logprobs=True).json()["choices"][0]["logprobs"]["content"]
    assert [entry["top_logprobs"] for entry in alone] == [[]] * len(alone)


def test_the_default_max_tokens_is_the_rest_of_the_context(byte_model):
    with live_server(byte_model, context=40, max_new_tokens=30) as server:
        free = server.chat(ignore_eos=True).json()
        assert free["usage"]["total_tokens"] == 40
        assert free["choices"][0]["finish_reason"] == "length"
        error = error_of(server.chat(max_completion_tokens=30))
        assert (error["param"], error["code"]) == ("max_completion_tokens", "context_length_exceeded")
        shared = server.chat("a", ignore_eos=True, n=3).json()
        assert [len(choice["nvium"]["token_ids"]) for choice in shared["choices"]] == [10] * 3
        assert error_of(server.chat("a", n=3, max_tokens=11))["param"] == "max_tokens"
        assert error_of(server.chat("a", n=3, max_completion_tokens=11))["param"] == "max_completion_tokens"
        same = server.chat("a", max_tokens=2, max_completion_tokens=2, ignore_eos=True).json()
        assert same["usage"]["completion_tokens"] == 2


def test_generation_stops_before_the_users_next_turn_unless_ignore_eos_is_set(byte_model):
    with live_server(byte_model) as server:
        choice = server.chat(max_tokens=80, ignore_eos=True).json()["choices"][0]
        free, ids = choice["message"]["content"], choice["nvium"]["token_ids"]
        stop = next(character for character in free[5:] if character.isascii())
        server.service.chat_template.stops = (stop,)
        cut = server.chat(max_tokens=80).json()["choices"][0]
        assert (cut["message"]["content"], cut["finish_reason"]) == (free[: free.index(stop)], "stop")
        server.service.chat_template.stops, server.service.chat_template.stop_token_ids = (), (ord(stop) + 1,)
        ended = server.chat(max_tokens=80).json()["choices"][0]
        assert ended["nvium"]["token_ids"] == ids[: ids.index(ord(stop) + 1) + 1]
        assert ended["finish_reason"] == "stop"
        assert server.chat(max_tokens=80, ignore_eos=True).json()["choices"][0]["message"]["content"] == free


def test_an_exception_of_the_template_is_a_400():
    with template_server("{{ raise_exception('no system messages') }}") as server:
        response = server.chat()
        assert response.status_code == 400
        assert "no system messages" in error_of(response)["message"]
        assert error_of(response)["param"] == "messages"


def test_the_user_is_logged_with_unsafe_characters_replaced(byte_model):
    with live_server(byte_model) as server, log_lines() as log:
        server.chat(max_tokens=1, user="a\nb" + "x" * 100)
        server.chat(max_tokens=1, user="a", safety_identifier="b")
        server.complete(max_tokens=1, user="c")
        server.complete(max_tokens=1)
        wait_until(lambda: len(log.lines) == 4)
    assert [line["user"] for line in log.lines] == ["a?b" + "x" * 61, "b", "c", None]


def test_ignored_schema_keywords_are_named(server):
    names = {"type": "array", "uniqueItems": True, "items": {"type": "string"}, "maxItems": 2}
    parameters = {"type": "object", "properties": {"names": names}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    assert "x-nvium-ignored-params" not in server.chat(tools=[tool], tool_choice="none", max_tokens=1).headers
    ignored = server.chat(tools=[tool], max_tokens=1).headers["x-nvium-ignored-params"]
    assert ignored == "tools.f.parameters.properties.names.uniqueItems"
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": parameters}}
    ignored = server.chat(response_format=schema, max_tokens=1).headers["x-nvium-ignored-params"]
    assert ignored == "response_format.json_schema.schema.properties.names.uniqueItems"
    ignored = server.chat(max_tokens=1, structured_outputs={"json": names}).headers["x-nvium-ignored-params"]
    assert ignored == "structured_outputs.json.uniqueItems"


def test_unknown_fields_within_messages_are_named(server):
    part = {"type": "text", "text": "a", "prompt_cache_breakpoint": {"mode": "explicit"}, "more": 1}
    response = server.chat(max_tokens=1, messages=[{"role": "user", "content": [part], "x y": 1}], best_of=1)
    assert response.headers["x-nvium-ignored-params"] == "best_of, messages[0].x?y, messages[0].content[0].more"


def test_every_message_that_the_server_returns_is_accepted(server):
    """A required call that is cut before its name has neither content nor calls."""
    user, cut = {"role": "user", "content": "a"}, {"role": "assistant", "content": None, "refusal": None}
    for message in (cut, {"role": "assistant"}, {"role": "assistant", "content": "", "tool_calls": []}):
        body = server.chat(messages=[user, message, user], max_tokens=1, return_token_ids=True).json()
        assert body["prompt_token_ids"] == token_ids("User:\na\n\nAssistant:\n\nUser:\na\n\nAssistant:\n")


def test_metadata_is_sent_once_and_effort_hints_are_reported_as_ignored(server):
    response = server.chat(max_tokens=1, metadata={"run": "7"}, reasoning_effort="low", verbosity="high")
    assert response.json()["metadata"] == {"run": "7"}
    assert response.headers["x-nvium-ignored-params"] == "reasoning_effort, verbosity"
    *others, last = streamed(server.chat, max_tokens=9, ignore_eos=True, metadata={"a": "b"})
    assert others and not any("metadata" in chunk for chunk in others)
    assert last["metadata"] == {"a": "b"}


def test_clamp_max_tokens_shortens_a_limit_beyond_the_context(byte_model):
    with live_server(byte_model, context=40, clamp_max_tokens=True) as server:
        for name in ("max_tokens", "max_completion_tokens"):
            response = server.chat(ignore_eos=True, **{name: 8000})
            assert response.json()["usage"]["total_tokens"] == 40
            assert response.headers["x-nvium-ignored-params"] == name
        assert server.complete(ignore_eos=True, max_tokens=8000).headers["x-nvium-ignored-params"] == "max_tokens"
        response = server.http.post("/v1/responses", json={"model": NAME, "input": "a", "max_output_tokens": 8000})
        assert response.headers["x-nvium-ignored-params"] == "max_output_tokens"
        assert "x-nvium-ignored-params" not in server.chat(max_tokens=2).headers
        assert error_of(server.complete(prompt="a" * 50))["code"] == "context_length_exceeded"
