import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvium_core.text.answer_parsers import (
    CLOSING,
    HERMES,
    JSON_LINES,
    LLAMA,
    MISTRAL,
    OPENING,
    CallFormat,
    ReasoningAndAnswer,
    ReasoningParser,
    ToolCallParser,
    call_format,
)
from nvium_core.text.chat_template import ChatTemplate
from tests.byte_model import load_byte_model, token_ids
from tests.text.chunks import chunks

thoughts = st.text(st.sampled_from("<think>/ \na<🦊"), max_size=20)
spaces = st.text(st.sampled_from(" \n"), max_size=3)
cuts = st.lists(st.integers(0, 200))


def read(parser: ReasoningParser, text: str, cuts: list[int]) -> ReasoningAndAnswer:
    pieces = [*map(parser.push, chunks(text, cuts)), parser.flush()]
    reasoning, answers = zip(*pieces, strict=True)
    return ReasoningAndAnswer("".join(reasoning), "".join(answers))


@given(spaces, thoughts, spaces, thoughts, cuts)
def test_reasoning_and_answer_do_not_depend_on_the_chunks(before, thought, after, answer, cuts):
    if CLOSING in thought + CLOSING[:-1]:
        return
    expected = ReasoningAndAnswer(thought.strip(" \n"), answer.lstrip(" \n"))
    text = f"{thought}{CLOSING}{after}{answer}"
    parser, opened = ReasoningParser(), ReasoningParser("thinking")
    assert read(parser, before + OPENING + text, cuts) == read(opened, text, cuts) == expected
    assert opened.num_characters == len(thought + CLOSING)
    assert parser.num_characters == len(before + OPENING + thought + CLOSING)


@given(thoughts, cuts)
def test_text_without_opening_tag_is_the_answer(text, cuts):
    assert read(ReasoningParser("answer"), text, cuts) == ("", text)
    if not text.lstrip().startswith(OPENING):
        assert read(ReasoningParser(), text, cuts) == ("", text)


@given(thoughts, cuts)
def test_reasoning_without_closing_tag_is_reasoning(text, cuts):
    if CLOSING not in text:
        assert read(ReasoningParser("thinking"), text, cuts) == (text.strip(" \n"), "")


@pytest.mark.parametrize(
    ("prompt", "answer", "expected"),
    [
        ("assistant\n", f"{OPENING}\nhm\n{CLOSING}\n\nyes", ("hm", "yes")),
        (f"assistant\n{OPENING}\n", f"hm\n{CLOSING}\n\nyes", ("hm", "yes")),
        (f"assistant\n{OPENING}\n\n{CLOSING}\n\n", "yes", ("", "yes")),
    ],
)
def test_an_opening_tag_in_the_prompt_is_recognised(prompt, answer, expected):
    tokenizer = load_byte_model().tokenizer
    tokenizer.chat_template = f"{OPENING}{CLOSING}"
    assert read(ChatTemplate(tokenizer).reasoning_parser(token_ids(prompt)), answer, []) == expected


texts = st.text(st.sampled_from('{}[]"\\ ,:a🦊\n')) | st.text()
values = st.recursive(
    st.none() | st.booleans() | st.integers() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
objects = st.dictionaries(texts, values, max_size=3)
names = st.from_regex(r"[a-zA-Z0-9_-]{1,64}", fullmatch=True)
styles = st.sampled_from([{"separators": (",", ":")}, {"indent": 1}, {"ensure_ascii": False}])

formats = st.sampled_from([JSON_LINES, HERMES, LLAMA, MISTRAL])


def call(form: CallFormat, name: str, arguments: str) -> str:
    return form.before + form.beginning + name + form.middle + arguments + form.end


def read_calls(form: CallFormat, text: str, cuts: list[int]) -> tuple[ToolCallParser, list[str], list[str], str]:
    """Push the text in pieces. Return the parser, the names, the arguments and the content."""
    parser, names, arguments, content = ToolCallParser(form), list[str](), list[str](), ""
    for chunk in chunks(text, cuts):
        parsed = parser.push(chunk)
        content += parsed.content
        for piece in parsed.calls:
            if piece.name:
                names.append(piece.name)
                arguments.append("")
            arguments[piece.number] += piece.arguments
    return parser, names, arguments, content


@given(formats, names, objects, styles, cuts)
def test_a_call_does_not_depend_on_the_chunks(form, name, arguments, style, cuts):
    text = call(form, name, json.dumps(arguments, **style))
    parser, found_names, [found_arguments], content = read_calls(form, text, cuts)
    assert parser.is_complete
    assert (found_names, content, parser.flush()) == ([name], "", "")
    assert json.loads(found_arguments) == arguments
    assert call(form, name, found_arguments) == text


@given(formats, st.lists(st.tuples(names, objects), min_size=2, max_size=4), cuts)
def test_several_calls_are_separated(form, calls, cuts):
    texts = [call(form, name, json.dumps(arguments)).removeprefix(form.before) for name, arguments in calls]
    _, found_names, found_arguments, _ = read_calls(form, form.before + form.between.join(texts) + form.after, cuts)
    assert found_names == [name for name, _ in calls]
    assert [json.loads(text) for text in found_arguments] == [arguments for _, arguments in calls]


@given(formats, names, objects, cuts, st.integers(0, 200))
def test_an_incomplete_call_is_returned_as_far_as_it_goes(form, name, arguments, cuts, length):
    whole = json.dumps(arguments)
    text = call(form, name, whole)[:length]
    parser, found_names, found_arguments, _ = read_calls(form, text, cuts)
    head = len(form.before + form.beginning + name + form.middle)
    assert found_names == ([name] if len(text) >= head else [])
    assert "".join(found_arguments) == text[head:][: len(whole)]
    assert parser.is_complete == (len(text) >= head + len(whole))


@given(formats, texts, cuts)
def test_text_without_a_call_is_content(form, text, cuts):
    parser, found_names, _, content = read_calls(form, text, cuts)
    assert found_names == []
    assert content + parser.flush() == text


def test_the_name_is_emitted_when_the_arguments_begin_and_each_character_at_once():
    parser = ToolCallParser()
    pushed = [parser.push(character) for character in call(JSON_LINES, "f", '{"a":"}"}')]
    pieces = [piece[:3] for parsed in pushed for piece in parsed.calls]
    assert pieces == [(0, "f", ""), *((0, "", character) for character in '{"a":"}"}')]


def test_the_format_follows_the_template():
    formats = {"{{ messages }}": JSON_LINES, "<tool_call>": HERMES, "[TOOL_CALLS]": MISTRAL, "<|python_tag|>": LLAMA}
    formats |= {"<tool_call><function=f><parameter=p>": None, "[TOOL_CALLS]f[ARGS]": None}
    assert {template: call_format(template) for template in formats} == formats
    assert call_format(None) == JSON_LINES
