"""`response_format` and `structured_outputs` over HTTP."""

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jsonschema
import pytest

from tests.server.grammar_samples import COSTLY_GRAMMARS
from tests.server.live_server import LiveServer, wait_until
from tests.server.log_lines import log_lines
from tests.server.raw_client import Json

SCHEMA: Json = {
    "type": "object",
    "properties": {"size": {"enum": ["small", "großartig"]}, "parts": {"type": "array", "items": {"type": "boolean"}}},
    "required": ["size", "parts"],
    "additionalProperties": False,
}

each_endpoint = pytest.mark.parametrize("ask", [LiveServer.complete, LiveServer.chat])


def text_of(choice: Json) -> str:
    text: str = choice["text"] if "text" in choice else choice["message"]["content"]
    return text


def response_format(schema: Any = None, **more: Any) -> Json:
    return {"type": "json_schema", "json_schema": {"name": "thing", "schema": schema, **more}}


FORMS = [{"structured_outputs": {"json": SCHEMA}}, {"structured_outputs": {"json": json.dumps(SCHEMA)}}]
FORMS += [{"response_format": response_format(SCHEMA, strict=True, description="a thing")}]


@each_endpoint
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("fields", FORMS)
def test_an_answer_matches_its_schema(server, ask, seed, fields):
    choices = ask(server, max_tokens=200, seed=seed, n=2, **fields).json()["choices"]
    for choice in choices:
        if choice["finish_reason"] == "stop":
            jsonschema.validate(json.loads(text_of(choice)), SCHEMA)
    assert "stop" in {choice["finish_reason"] for choice in choices}


@each_endpoint
def test_json_object_generates_an_object(server, ask):
    bias = {str(ord("}") + 1): 8}
    for format_ in ({"type": "json_object"}, response_format()):
        choice = ask(server, max_tokens=200, logit_bias=bias, response_format=format_).json()["choices"][0]
        assert choice["finish_reason"] == "stop"
        assert isinstance(json.loads(text_of(choice)), dict)


@each_endpoint
def test_an_answer_matches_its_regex_or_is_one_of_the_choices(server, ask):
    for seed in range(5):
        asked = {"max_tokens": 50, "seed": seed}
        matched = ask(server, structured_outputs={"regex": "[a-f]{3}(é|日本)"}, **asked).json()["choices"][0]
        assert re.fullmatch("[a-f]{3}(é|日本)", text_of(matched))
        chosen = ask(server, structured_outputs={"choice": ["yes", "no", "nö"]}, **asked).json()["choices"][0]
        assert text_of(chosen) in ("yes", "no", "nö")
        assert {matched["finish_reason"], chosen["finish_reason"]} == {"stop"}


def test_a_form_ignores_ignore_eos_and_the_templates_stop_strings(server):
    form = {"structured_outputs": {"regex": "a\nUser:b"}}
    for ignore_eos in (True, False):
        choice = server.chat(max_tokens=50, ignore_eos=ignore_eos, **form).json()["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("a\nUser:b", "stop")


def test_text_is_the_neutral_format(server):
    plain, text = (server.chat(max_tokens=9, **more).json() for more in ({}, {"response_format": {"type": "text"}}))
    assert text["choices"][0]["message"] == plain["choices"][0]["message"]


@pytest.mark.parametrize("name", COSTLY_GRAMMARS)
def test_a_costly_grammar_is_answered_or_refused_while_others_are_served(server, name):
    asked = partial(server.complete, structured_outputs={"grammar": COSTLY_GRAMMARS[name]}, max_tokens=20, n=2, seed=1)
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(asked, timeout=300)
        while not answer.done():
            assert server.http.get("/livez").status_code == 200
            time.sleep(0.05)
    assert answer.result().status_code in (200, 400)
    assert server.complete(max_tokens=2).status_code == 200


COSTLY = {"structured_outputs": {"regex": "(.{0,500}){20}"}, "max_tokens": 400, "n": 8, "logit_bias": {"0": -100}}


@each_endpoint
def test_a_regex_that_is_too_costly_while_sampling_is_refused_with_one_warning(server, ask):
    with log_lines() as log:
        response = ask(server, **COSTLY)
        lines = partial(log.of, response.headers["x-request-id"])
        wait_until(lambda: "request" in [line["event"] for line in lines()])
    assert (response.status_code, response.json()["error"]["code"]) == (400, "too_costly")
    assert [line["level"] for line in lines()] == ["warning", "info"]
    assert all("exception" not in line for line in lines())
    streamed = ask(server, **COSTLY, stream=True)
    assert streamed.status_code == 400 or '"too_costly"' in streamed.text
