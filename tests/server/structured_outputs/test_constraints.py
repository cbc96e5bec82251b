"""Grammars accept the same texts as jsonschema, `re` and string comparison."""

import json
import re
from collections.abc import Iterator, Mapping
from datetime import date
from functools import cache
from typing import Any

import jsonschema
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from nvium_core import Constraint, Engine, LoadedModel, SamplingParams, TooCostly, load_model
from nvium_core.text.answer_parsers import JSON_LINES
from nvium_core.text.gguf_tokenizer import gguf_tokenizer
from server.errors import InvalidField
from server.structured_outputs.constraints import Constraints
from server.structured_outputs.grammars import (
    ANY_OBJECT,
    Grammar,
    JsonSchema,
    Lark,
    OneOf,
    Regex,
    Schema,
    ToolCalls,
    arguments,
)
from tests.byte_model import load_byte_model, token_ids
from tests.server.grammar_samples import (
    COSTLY_PATTERNS,
    COSTLY_SCHEMAS,
    REFUSED_PATTERNS,
    REFUSED_SCHEMAS,
    closed,
    either,
    schemas,
)
from tests.text.test_gguf_tokenizer import sentence_piece_fields
from tests.text.tokenizer_kinds import KINDS

MODELS = {"bytes": load_byte_model, "embedded": load_model}


@cache
def loaded(name: str) -> tuple[LoadedModel, Engine, Constraints]:
    model = MODELS[name]()
    engine = Engine(model.model)
    return model, engine, Constraints(model.tokenizer, engine.limits.end_token_ids)


def compiled(grammar: Grammar, name: str = "bytes") -> Constraint:
    constraint = loaded(name)[2].compile("the_field", grammar).constraint
    assert constraint is not None
    return constraint


def refusal(grammar: Grammar) -> str:
    """Return the message with which the grammar is refused."""
    with pytest.raises(InvalidField) as refused:
        compiled(grammar)
    assert refused.value.param == "the_field"
    assert 0 < len(refused.value.message) < 300
    assert "\n" not in refused.value.message
    return refused.value.message


def allows(constraint: Constraint, token_id: int) -> bool:
    return constraint.allowed()[token_id // 8] >> token_id % 8 & 1 == 1


def is_answer(grammar: Grammar, text: str) -> bool:
    """Return whether the grammar accepts the text, byte by byte."""
    return accepts(compiled(grammar), text)


def accepts(prototype: Constraint, text: str) -> bool:
    constraint = prototype.fork()
    for token_id in token_ids(text):
        if constraint.is_over or not allows(constraint, token_id):
            return False
        constraint.advance(token_id)
    return constraint.is_over or allows(constraint, 0)


def validator(schema: dict[str, Any]) -> jsonschema.Draft202012Validator:
    kind = jsonschema.Draft202012Validator
    kind.check_schema(schema)
    return kind(schema, format_checker=FORMATS)


FORMATS = jsonschema.FormatChecker(jsonschema.Draft202012Validator.FORMAT_CHECKER.checkers)


@FORMATS.checks("date", raises=ValueError)
def is_date(value: object) -> bool:
    """Return whether it is a date in some year: llguidance has February 29 in all of them."""
    has_form = isinstance(value, str) and re.fullmatch(r"\d{4}-\d\d-\d\d", value)
    return bool(date.fromisoformat("2000" + value[4:])) if has_form else not isinstance(value, str)


def generated(name: str, grammar: Grammar, *, seeds: int = 1, **params: Any) -> Iterator[tuple[str, str | None]]:
    """Generate texts and their finish reasons. A bias towards closing brackets lets most texts end."""
    model, engine, constraints = loaded(name)
    closers = {id_: 4.0 for id_ in range(1, len(model.tokenizer)) if constraints.vocabulary[id_] in CLOSERS}
    params = {"max_tokens": 150, "logit_bias": closers, "n": seeds, "seed": 0, **params}
    constraint = constraints.compile("f", grammar).constraint
    for completion in engine.generate([[1]], SamplingParams(constraint=constraint, **params)):
        without_end = completion.token_ids[:-1] if completion.token_ids[-1] == 0 else completion.token_ids
        text = b"".join(map(constraints.vocabulary.__getitem__, without_end))
        yield text.decode(errors="ignore"), completion.finish_reason  # the last character may be incomplete


CLOSERS = {b'"', b"]", b"}", b",", b":", b'":', b'",', b'"}', b"]}"}


@settings(max_examples=settings().max_examples // 4)
@given(schemas, st.sampled_from(["exits", "exits", "mixture"]), st.sampled_from([0.0, 1.0, 1.5]))
def test_generated_json_is_valid_under_its_schema(schema, sampling, temperature):
    for text, reason in generated("bytes", JsonSchema(schema), seeds=3, sampling=sampling, temperature=temperature):
        event(f"finish reason: {reason}")
        if reason == "stop":
            assert validator(schema).is_valid(json.loads(text))


@given(schemas, st.data())
def test_compact_json_is_accepted_if_and_only_if_it_is_valid(schema, data):
    value = data.draw(instances(schema))
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False).replace("\x7f", "\\u007f")  # llguidance's form
    assert is_answer(JsonSchema(schema), text) == validator(closed(schema)).is_valid(value)


def instances(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Draw values that are often valid, with properties in the schema's order."""
    kind = schema.get("type")
    if "anyOf" in schema:
        return st.one_of([instances(member) for member in schema["anyOf"]])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    if kind == "array":
        return st.lists(instances(schema["items"]), max_size=4)
    if kind == "object":
        optional = {key: instances(value) for key, value in schema["properties"].items()}
        drawn = st.fixed_dictionaries({}, optional=optional)
        return drawn.map(lambda value: {key: value[key] for key in optional if key in value})
    if "const" in schema:
        return st.just(schema["const"])
    return SCALARS[kind] if isinstance(kind, str) else st.integers(-9, 9) | st.none()


SCALARS: dict[str, st.SearchStrategy[Any]] = {
    "boolean": st.booleans(),
    "null": st.none(),
    "number": st.integers(-99, 99) | st.sampled_from([0.5, -1.25, 1e30]),
    "integer": st.integers(-120, 1200),
    "string": st.text(max_size=6) | st.sampled_from(["a", "abcx", "2024-02-29", "2024-13-01"]),
}


def test_json_has_no_whitespace_whatever_the_schema_says():
    for grammar in (ANY_OBJECT, JsonSchema({"type": "object", "x-guidance": {"whitespace_flexible": True}})):
        assert is_answer(grammar, '{"a":[1,{"b":" "}]}')
        assert not is_answer(grammar, '{"a": 1}')
        assert not is_answer(grammar, " {}")
        assert not is_answer(grammar, "[]")


def test_an_answer_is_over_after_its_last_bracket():
    constraint = compiled(ANY_OBJECT)
    for token_id in token_ids("{}"):
        constraint.advance(token_id)
    assert constraint.is_over


def test_every_end_of_text_token_may_end_a_number_after_any_digit():
    model, _, _ = loaded("bytes")
    number = Constraints(model.tokenizer, {0, 5}).compile("f", JsonSchema({"type": "integer"})).constraint
    [seven], ends = token_ids("7"), (0, 5)
    assert number is not None
    assert not any(allows(number, end) for end in ends)
    number.advance(seven)
    assert not number.is_over
    assert allows(number, seven)
    for end in ends:
        assert allows(number, end)
        ended = number.fork()
        ended.advance(end)
        assert ended.is_over


def test_a_disallowed_token_raises_an_error_that_does_not_quote_the_text():
    constraint = compiled(OneOf(["secret"]))
    constraint.advance(token_ids("x")[0])
    with pytest.raises(RuntimeError, match=r"^the grammar does not allow a token that was sampled$"):
        constraint.allowed()


def test_a_limit_exceeded_while_matching_raises_too_costly():
    constraint = compiled(Regex("(.{0,500}){20}"))
    with pytest.raises(TooCostly, match=r"too complex|out of time"):
        [(constraint.allowed(), constraint.advance(token_id)) for token_id in token_ids("abc" * 100)]


PATTERNS = [r"[ab]+", r"(foo|bar){2}", r"a/b\/c", "x\ny", r"[0-9]{2}-[^x-z]?", "é+", r'"quoted"', "a|b|"]
PATTERNS += [r"[/\]]*", r"[ab]\\", "//.*"]


@given(st.sampled_from(PATTERNS), st.data())
def test_a_regex_matches_the_whole_answer(pattern, data):
    text = data.draw(st.from_regex(pattern, fullmatch=True, alphabet=st.characters(max_codepoint=0xFF)) | st.text())
    assert is_answer(Regex(pattern), text) == bool(re.fullmatch(pattern, text))


@given(st.lists(st.text(min_size=1, max_size=5), min_size=1, max_size=5), st.text(max_size=5))
def test_a_choice_accepts_exactly_its_texts(options, other):
    constraint = compiled(OneOf(options))
    for text in [*options, other, options[0] + other, options[0][:-1]]:
        assert accepts(constraint, text) == (text in options)


FUNCTIONS: dict[str, dict[str, Any] | None] = {
    "f": {
        "properties": {"x": {"$ref": "#/$defs/x"}},
        "required": ["x"],
        "additionalProperties": False,
        "$defs": {"x": {"type": "integer"}},
    },
    "f2": None,
    "get_weather": {"type": "object", "properties": {"city": {"enum": ["Bern", "Rom"]}}, "additionalProperties": False},
}


def calls_of(functions: Mapping[str, Schema | None]) -> ToolCalls:
    return ToolCalls({name: arguments(parameters) for name, parameters in functions.items()})


def call(name: str, arguments: str) -> str:
    return JSON_LINES.beginning + name + JSON_LINES.middle + arguments + JSON_LINES.end


@pytest.mark.parametrize(
    ("name", "arguments", "is_valid"),
    [
        ("f", '{"x":12}', True),
        ("f", '{"x":"12"}', False),
        ("f", "{}", False),
        ("f2", "{}", True),
        ("f2", '{"x":{"y":["}",2]}}', True),
        ("f2", '{"x": 1}', False),
        ("f2", "[]", False),
        ("get_weather", '{"city":"Rom"}', True),
        ("get_weather", "{}", True),
        ("get_weather", '{"city":"Paris"}', False),
        ("f3", "{}", False),
    ],
)
def test_a_tool_call_names_a_function_and_its_arguments_match_the_schema(name, arguments, is_valid):
    assert is_answer(calls_of(FUNCTIONS), call(name, arguments)) == is_valid
    if name in FUNCTIONS:
        assert is_answer(calls_of({name: FUNCTIONS[name]}), call(name, arguments)) == is_valid
        assert not is_answer(calls_of({"other": None}), call(name, arguments))
    assert not is_answer(calls_of(FUNCTIONS), call(name, arguments).replace(": ", ":"))


@pytest.mark.parametrize("name", MODELS)
def test_models_call_the_required_function(name):
    answers = list(generated(name, calls_of({"get_weather": FUNCTIONS["get_weather"]}), seeds=5))
    called = [json.loads(text) for text, reason in answers if reason == "stop"]
    assert called
    for answer in called:
        assert answer["name"] == "get_weather"
        jsonschema.validate(answer["arguments"], FUNCTIONS["get_weather"])


@pytest.mark.parametrize("kind", REFUSED_SCHEMAS)
def test_unusable_schemas_are_refused_as_response_and_as_parameters(kind):
    assert refusal(JsonSchema(REFUSED_SCHEMAS[kind]))
    assert refusal(ToolCalls({"f": arguments(REFUSED_SCHEMAS[kind], is_strict=True)}))


REFUSED_CHOICES: list[list[str]] = [[], [""], ["a", ""], ["\ud800"], ["a" * 100_001]]


@pytest.mark.parametrize("grammar", [*map(Regex, REFUSED_PATTERNS), *map(OneOf, REFUSED_CHOICES)])
def test_unusable_patterns_and_choices_are_refused(grammar):
    assert refusal(grammar)


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (Regex("(a"), "the_field: unclosed group"),
        (Lark("root ::= option"), "the_field: must be a valid Lark or GBNF grammar: Rule 'option' not found"),
        (Lark("start: option"), 'the_field: unknown name: "option"'),
        (Lark('start: "a'), "the_field: line 1, column 10: lexer error"),
        (JsonSchema({"type": "strin"}), "the_field: type must be null, boolean, .* or object, got 'strin'"),
        (JsonSchema({"type": "integer", "minimum": 5, "maximum": 1}), r"the_field: minimum \(5\) is greater .* \(1\)"),
        (JsonSchema({"$ref": "#"}), "the_field: no text satisfies it"),
        (JsonSchema({"items": {"not": {"type": "null"}}}), "the_field: items: not supported: not"),
        (JsonSchema({"allOf": [either(i) for i in range(8)]}), ".*too complex.*"),  # its second mask
        (calls_of({}), "the_field: must be a non-empty list of functions"),
        *((calls_of({name: None}), ".*function's name.*") for name in ("", "a b", 'a"', "ä", "a" * 65, "a\n")),
        *((calls_of({"f": {"type": kind}}), ".*must have type object.*") for kind in ("strin", ["object", "null"])),
    ],
)
def test_refusals_name_the_field_and_the_reason(grammar, message):
    assert re.fullmatch(message, refusal(grammar))


@pytest.mark.parametrize("grammar", [*map(JsonSchema, COSTLY_SCHEMAS.values()), *map(Regex, COSTLY_PATTERNS)])
def test_costly_grammars_within_the_limits_still_generate(grammar):
    for text, _ in generated("embedded", grammar, max_tokens=20, logit_bias={}):
        assert isinstance(text, str)


def test_a_tokenizer_with_byte_fallback_is_supported():
    tokenizer = gguf_tokenizer(sentence_piece_fields().get)
    constraint = Constraints(tokenizer, {2}).compile("f", Regex(" The fox é\n")).constraint
    assert constraint is not None
    for token_id in tokenizer("The fox é\n", add_special_tokens=False).input_ids:
        assert allows(constraint, token_id)
        constraint.advance(token_id)
    assert constraint.is_over


def test_a_tokenizer_without_bytes_has_token_texts_but_no_constraints():
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=KINDS["WordLevel"]())
    constraints = Constraints(tokenizer, {0})
    assert constraints.vocabulary[tokenizer.convert_tokens_to_ids("日本語")] == "日本語".encode()
    with pytest.raises(InvalidField, match="are not bytes"):
        constraints.compile("f", ANY_OBJECT)
