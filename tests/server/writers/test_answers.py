"""A stream equals the whole response of the same seed. Log-probabilities equal the engine's and align with the text."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvium_core import Completion, Engine, LoadedModel, SamplingParams
from nvium_core.text.detokenizer import REPLACEMENT
from tests.byte_model import token_ids
from tests.server.raw_client import Json, events_of

PIECES = ["a", "é", "日本", "\u0301", "👩\u200d🚀", "\n", "\ufffd", " "]


def merged(earlier: Any, later: Any) -> Any:
    """Merge the fields of two chunks: join strings and lists, and keep the value next to a null."""
    if earlier is None or later is None:
        return later if earlier is None else earlier
    if isinstance(earlier, dict):
        return {name: merged(earlier.get(name), later.get(name)) for name in earlier | later}
    return earlier + later


def joined(chunks: list[Json]) -> list[Json]:
    """Merge the choices of all chunks, by index."""
    choices: dict[int, Json] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            fields = {name: value for name, value in choice.items() if name != "index"}
            choices[choice["index"]] = merged(choices.get(choice["index"], {}), fields)
    return [{"index": index, **choices[index]} for index in sorted(choices)]


def rounded(value: Any) -> Any:
    """Round floats: their last digits depend on the batch."""
    if isinstance(value, dict):
        return {name: rounded(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [rounded(inner) for inner in value]
    return round(value, 6) if isinstance(value, float) else value


def utf8_bias(text: str) -> dict[str, float]:
    """Make the bytes of a text likely, to generate complete and incomplete multi-byte characters."""
    return {str(token_id): 4.0 for token_id in token_ids(text)}


stop_strings = st.lists(st.text(st.sampled_from("ae\u00e9\u65e5\u0301\n"), min_size=1, max_size=2), max_size=4)
prompts = st.sampled_from(PIECES) | st.lists(st.sampled_from(PIECES), min_size=2, max_size=3)
options = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 10**6),
        "n": st.integers(1, 3),
        "temperature": st.sampled_from([0, 1]),
        "max_tokens": st.integers(1, 25),
        "stop": stop_strings,
        "ignore_eos": st.booleans(),
        "include_stop_str_in_output": st.booleans(),
        "logit_bias": st.lists(st.sampled_from(PIECES), max_size=4).map("".join).map(utf8_bias),
        "return_token_ids": st.booleans(),
        "response_format": st.sampled_from([None, None, {"type": "json_object"}]),
        "nvium": st.fixed_dictionaries({"text_offsets": st.booleans(), "probabilities": st.booleans()}),
        "stream_options": st.fixed_dictionaries({"include_usage": st.just(True)}),
    }
)


@settings(max_examples=40, deadline=None)
@given(asked=options, logprobs=st.none() | st.integers(0, 3), echo=st.booleans(), prompt=prompts)
def test_completions(server, asked, logprobs, echo, prompt):
    body = asked | {"prompt": prompt, "logprobs": logprobs, "echo": echo}
    whole = server.complete(**body | {"stream_options": None}).json()
    *chunks, last = events_of(server.complete(**body, stream=True).text)
    assert rounded(joined(chunks)) == rounded(whole["choices"])
    assert last["usage"] == whole["usage"] | {"prompt_tokens_details": last["usage"]["prompt_tokens_details"]}
    assert chunks[-1]["nvium"] == whole["nvium"]
    assert_arrays_are_aligned(whole)


@settings(max_examples=40, deadline=None)
@given(asked=options, logprobs=st.none() | st.integers(0, 3), text=st.sampled_from(PIECES))
def test_chat(server, asked, logprobs, text):
    asked_logprobs = {} if logprobs is None else {"logprobs": True, "top_logprobs": logprobs}
    body = asked | asked_logprobs
    whole = server.chat(text, **body | {"stream_options": None}).json()
    *chunks, last = events_of(server.chat(text, **body, stream=True).text)
    expected = whole["choices"]
    for choice in expected:
        choice["delta"] = choice.pop("message") | {"nvium": choice["nvium"]}
        del choice["delta"]["refusal"]
    assert rounded(joined(chunks)) == rounded(expected)
    assert last["usage"] == whole["usage"] | {"prompt_tokens_details": last["usage"]["prompt_tokens_details"]}
    assert chunks[-1]["nvium"] == whole["nvium"]
    assert chunks[0].get("prompt_token_ids") == whole.get("prompt_token_ids")


def assert_arrays_are_aligned(whole: Json) -> None:
    for choice in whole["choices"]:
        assert len({len(values) for values in choice["nvium"].values()}) == 1
        if choice["logprobs"] and (offsets := choice["nvium"].get("text_offsets")):
            assert choice["logprobs"]["text_offset"][-len(offsets) :] == offsets
        if choice["logprobs"]:
            assert len({len(values) for values in choice["logprobs"].values()}) == 1


PROMPT = "Oncé upon"


def engine_scores(model: LoadedModel, prompt: list[int], **asked: Any) -> Completion:
    params = SamplingParams(seed=1, logprobs=3, prompt_logprobs=True, **asked)
    [completion] = Engine(model.model).generate([prompt], params)
    return completion


def test_logprobs_equal_the_engines(server, byte_model):
    expected = engine_scores(byte_model, token_ids(PROMPT), max_tokens=8, ignore_eos=True)
    [choice] = server.complete(prompt=PROMPT, max_tokens=8, ignore_eos=True, logprobs=3).json()["choices"]
    logprobs = choice["logprobs"]
    assert logprobs["token_logprobs"] == pytest.approx([score.logprob for score in expected.scores], abs=1e-9)
    for top, score in zip(logprobs["top_logprobs"], expected.scores, strict=True):
        assert 3 <= len(top) <= 4
        assert max(top.values()) == pytest.approx(score.top[0][1])


def test_an_echoed_prompt_is_scored_with_null_first(server, byte_model):
    expected = [score.logprob for score in engine_scores(byte_model, token_ids(PROMPT), max_tokens=0).prompt_scores]
    for prompt in (PROMPT, token_ids(PROMPT)):
        choice = server.complete(prompt=prompt, max_tokens=0, echo=True, logprobs=1).json()["choices"][0]
        assert choice["text"] == PROMPT
        assert choice["finish_reason"] == "length"
        logprobs = choice["logprobs"]
        assert logprobs["token_logprobs"][0] is None
        assert logprobs["top_logprobs"][0] is None
        assert logprobs["token_logprobs"][1:] == pytest.approx(expected, abs=1e-9)


def test_one_token_after_an_echoed_prompt_is_scored_with_it(server):
    asked = {"prompt": [token_ids(PROMPT), token_ids("a")], "echo": True, "logprobs": 1, "max_tokens": 1}
    first, second = server.complete(**asked, temperature=0).json()["choices"]
    assert len(first["logprobs"]["token_logprobs"]) == len(token_ids(PROMPT)) + 1
    assert second["logprobs"]["token_logprobs"][0] is None
    assert len(second["logprobs"]["tokens"]) == 2


def test_the_alternatives_contain_the_sampled_token_with_the_same_logprob(server):
    logprobs = server.complete(max_tokens=40, echo=True, logprobs=2, ignore_eos=True).json()["choices"][0]["logprobs"]
    rows = zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True)
    for token, logprob, top in list(rows)[1:]:
        assert top[token] == logprob
        assert list(top.values()) == sorted(top.values(), reverse=True)
    logprobs = server.complete(max_tokens=5, logprobs=0).json()["choices"][0]["logprobs"]
    assert [list(top) for top in logprobs["top_logprobs"]] == [[token] for token in logprobs["tokens"]]


def test_offsets_locate_each_token_in_the_text(server):
    choice = server.complete(prompt=PROMPT, max_tokens=60, echo=True, logprobs=0, ignore_eos=True).json()["choices"][0]
    logprobs = choice["logprobs"]
    assert logprobs["text_offset"][: len(PROMPT)] == [0, 1, 2, 3, 3, 4, 5, 6, 7]
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        if not token.startswith(("bytes:", "<|")):
            assert choice["text"][offset] in (token, REPLACEMENT)  # incomplete characters appear with their last byte
