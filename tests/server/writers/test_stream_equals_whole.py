"""The joined chunks of a stream equal the whole response of the same seed, for any request."""

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.byte_model import token_ids
from tests.server.live_server import LiveServer

Json = dict[str, Any]

PIECES = ["a", "é", "日本", "\u0301", "👩\u200d🚀", "\n", "\ufffd", " "]


def events(text: str) -> list[Json]:
    *lines, end = text.split("\n\n")
    assert (lines.pop(), end) == ("data: [DONE]", "")
    return [json.loads(line.removeprefix("data: ")) for line in lines]


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
def test_completions(
    server: LiveServer, asked: Json, logprobs: int | None, echo: bool, prompt: str | list[str]
) -> None:
    body = asked | {"prompt": prompt, "logprobs": logprobs, "echo": echo}
    whole = server.complete(**body | {"stream_options": None}).json()
    *chunks, last = events(server.complete(**body, stream=True).text)
    assert rounded(joined(chunks)) == rounded(whole["choices"])
    assert last["usage"] == whole["usage"] | {"prompt_tokens_details": last["usage"]["prompt_tokens_details"]}
    assert chunks[-1]["nvium"] == whole["nvium"]
    assert_arrays_are_aligned(whole)


@settings(max_examples=40, deadline=None)
@given(asked=options, logprobs=st.none() | st.integers(0, 3), text=st.sampled_from(PIECES))
def test_chat(server: LiveServer, asked: Json, logprobs: int | None, text: str) -> None:
    asked_logprobs = {} if logprobs is None else {"logprobs": True, "top_logprobs": logprobs}
    body = asked | asked_logprobs
    whole = server.chat(text, **body | {"stream_options": None}).json()
    *chunks, last = events(server.chat(text, **body, stream=True).text)
    expected = [
        {("delta" if name == "message" else name): value for name, value in choice.items()}
        for choice in whole["choices"]
    ]
    for choice in expected:
        del choice["delta"]["refusal"]
        choice["delta"]["nvium"] = choice["nvium"]
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


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), pieces=st.lists(st.sampled_from(PIECES), min_size=1, max_size=3))
def test_the_text_equals_all_tokens_decoded_at_once_except_for_an_incomplete_character(
    server: LiveServer, seed: int, pieces: list[str]
) -> None:
    bias = utf8_bias("".join(pieces))
    choice = server.complete(seed=seed, max_tokens=20, ignore_eos=True, logit_bias=bias).json()["choices"][0]
    decoded = bytes(token_id - 1 for token_id in choice["nvium"]["token_ids"] if token_id)
    assert choice["text"].rstrip("\ufffd") == decoded.decode(errors="replace").rstrip("\ufffd")
