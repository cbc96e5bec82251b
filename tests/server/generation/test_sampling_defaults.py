from typing import Any

import pytest
from transformers import GenerationConfig

from nvium_core import LLM, InvalidRequest, LoadedModel, sampling_defaults
from server.routes.openapi import document
from tests.byte_model import load_byte_model
from tests.server.live_server import LiveServer, live_server, server_fixture

OWN = {"temperature": 0.3, "top_p": 0.9, "top_k": 5, "repetition_penalty": 1.5}


def suggesting(**sampling: Any) -> LoadedModel:
    loaded = load_byte_model()
    loaded.model.generation_config = GenerationConfig(do_sample=True, **sampling)
    return loaded


def answers(server: LiveServer, **fields: Any) -> list[str]:
    """Return the texts of a completion, a chat and a response, without the fields that other endpoints have."""
    asked = {"seed": 1, "max_tokens": 16, **fields}
    response = {name: value for name, value in asked.items() if name not in ("max_tokens", "repetition_penalty")}
    body = {"model": "default", "input": "Hello", "max_output_tokens": 16, **response}
    return [
        server.complete(**asked).json()["choices"][0]["text"],
        server.chat(**asked).json()["choices"][0]["message"]["content"],
        server.http.post("/v1/responses", json=body).json()["output"][0]["content"][0]["text"],
    ]


own = server_fixture(lambda: live_server(suggesting(**OWN)))


def test_the_models_values_are_the_defaults_of_every_endpoint(own, server):
    assert own.http.get("/v1/models").json()["data"][0]["nvium"]["suggested"] == OWN
    by_default, given = answers(own), answers(server, **OWN)
    assert by_default[:2] == given[:2] != answers(server)[:2]
    assert by_default[2] == by_default[1]
    assert answers(own, nvium={"sampling": "original"}) == answers(server, nvium={"sampling": "original"})


def test_the_description_of_the_api_has_the_models_values(own, server):
    schemas = own.http.get("/openapi.json").json()["components"]["schemas"]
    for endpoint in ("Completion", "Chat", "Response"):
        fields = schemas[f"{endpoint}Request"]["properties"]
        assert {name: fields[name]["default"] for name in OWN if name in fields}.items() <= OWN.items()
        assert fields["temperature"]["default"] == OWN["temperature"]
    assert "default" not in schemas["Response"]["properties"]["temperature"]
    assert server.http.get("/openapi.json").json() == document()


def test_a_field_in_the_request_wins_also_if_it_is_openais_default(server):
    neutral = {"temperature": 1, "top_p": 1, "top_k": 0, "repetition_penalty": 1}
    with live_server(suggesting(temperature=0.3, top_k=5)) as other:
        assert answers(other, **neutral) == answers(server)


def test_a_response_reports_the_values_that_it_was_sampled_with(own):
    reported = own.http.post("/v1/responses", json={"model": "default", "input": "Hello", "top_p": 0.5}).json()
    assert (reported["temperature"], reported["top_p"]) == (0.3, 0.5)


def test_off_restores_openais_defaults(server):
    with live_server(suggesting(**OWN), generation_config="off") as off:
        assert answers(off) == answers(server)
        assert off.http.get("/v1/models").json()["data"][0]["nvium"]["suggested"] == {"temperature": 1.0, "top_p": 1.0}


def test_python_has_the_same_defaults():
    asked = {"max_tokens": 16, "seed": 1}
    plain = LLM(load_byte_model())
    assert LLM(suggesting(**OWN)).generate("Once", **asked).text == plain.generate("Once", **asked, **OWN).text
    off = LLM(suggesting(**OWN), generation_config="off")
    assert off.generate("Once", **asked).text == plain.generate("Once", **asked).text


@pytest.mark.parametrize("wrong", [{"temperature": 3.0}, {"top_p": 0.0}, {"repetition_penalty": "high"}])
def test_a_value_out_of_range_is_refused_by_name(wrong):
    model = load_byte_model().model
    model.generation_config = type("Damaged", (), wrong)()
    with pytest.raises(InvalidRequest, match=rf"^{next(iter(wrong))}: .*, in the model's generation config"):
        sampling_defaults(model)
    assert sampling_defaults(model, "off") == {}
