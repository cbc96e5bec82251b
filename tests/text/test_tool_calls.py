import json
from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from nvium_core.text.tool_calls import BEGINNING, END, MIDDLE, ToolCallReader

texts = st.text(st.sampled_from('{}[]"\\ ,:a🦊\n')) | st.text()
values = st.recursive(
    st.none() | st.booleans() | st.integers() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
objects = st.dictionaries(texts, values, max_size=3)
names = st.from_regex(r"[a-zA-Z0-9_-]{1,64}", fullmatch=True)
styles = st.sampled_from([{"separators": (",", ":")}, {"indent": 1}, {"ensure_ascii": False}])
cuts = st.lists(st.integers(0, 200))


def call(name: str, arguments: str) -> str:
    return BEGINNING + name + MIDDLE + arguments + END


def read(text: str, cuts: list[int]) -> tuple[ToolCallReader, list[str], str]:
    """The reader after the text in pieces, the names it gave and the arguments joined."""
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    reader = ToolCallReader()
    pieces = [reader.push(text[start:end]) for start, end in pairwise(places)]
    return reader, [piece.name for piece in pieces if piece.name], "".join(piece.arguments for piece in pieces)


@given(names, objects, styles, cuts)
def test_a_call_cut_anywhere_comes_out_as_json_reads_it(
    name: str, arguments: dict[str, Any], style: dict[str, Any], cuts: list[int]
) -> None:
    text = call(name, json.dumps(arguments, **style))
    reader, told_names, told_arguments = read(text, cuts)
    assert reader.is_complete
    assert told_names == [json.loads(text)["name"]] == [name]
    assert json.loads(told_arguments) == json.loads(text)["arguments"] == arguments
    assert call(name, told_arguments) == text


@given(names, objects, cuts, st.integers(0, 200))
def test_of_a_call_that_breaks_off_all_that_came_is_told_and_no_more(
    name: str, arguments: dict[str, Any], cuts: list[int], length: int
) -> None:
    whole = json.dumps(arguments)
    text = call(name, whole)[:length]
    reader, told_names, told_arguments = read(text, cuts)
    head = len(BEGINNING + name + MIDDLE)
    assert told_names == ([name] if len(text) >= head else [])
    assert told_arguments == text[head:][: len(whole)]
    assert reader.is_complete == (len(text) >= head + len(whole))


def test_each_character_of_the_arguments_is_told_at_once_and_the_name_when_they_begin() -> None:
    reader = ToolCallReader()
    told = [reader.push(character) for character in call("f", '{"a":"}"}')]
    assert [piece for piece in told if any(piece)] == [("f", ""), *(("", c) for c in '{"a":"}"}')]
