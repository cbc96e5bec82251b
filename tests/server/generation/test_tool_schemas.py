"""Tools without `strict` accept any schema: keywords that cannot be enforced are dropped and reported."""

from typing import Any

import pytest

from server.generation.constraints import RequestConstraint
from server.generation.grammars import JsonSchema, Schema, ToolCalls, arguments
from tests.byte_model import token_ids
from tests.server.generation.test_constraints import allows, loaded, refusal

Json = dict[str, Any]

STRING: Json = {"type": "string"}


def compiled(parameters: Schema, *, is_strict: bool = False, **others: Schema) -> RequestConstraint:
    functions = {"f": parameters, **others}
    signatures = {name: arguments(schema, is_strict=is_strict) for name, schema in functions.items()}
    return loaded("bytes")[2].compile("tools", ToolCalls(signatures))


def of_property(schema: Json) -> Json:
    return {"type": "object", "properties": {"a": schema, "b": {"type": "integer"}}}


DROPPED: list[tuple[Json, str]] = [
    ({"type": "object", "propertyNames": {"pattern": "^a"}}, "propertyNames"),
    ({"not": {"type": "string"}}, "not"),
    ({"type": "object", "if": {"required": ["x"]}, "then": {"required": ["y"]}}, "if"),
    ({"type": "array", "contains": {"const": 1}}, "contains"),
    ({"type": "object", "dependentRequired": {"x": ["y"]}}, "dependentRequired"),
    ({"type": "object", "dependentSchemas": {"x": {"required": ["y"]}}}, "dependentSchemas"),
    ({"type": "object", "unevaluatedProperties": False}, "unevaluatedProperties"),
    ({"type": "array", "uniqueItems": True, "items": STRING}, "uniqueItems"),
    ({"$dynamicRef": "#x"}, "$dynamicRef"),
    ({"type": "string", "pattern": "^(?!x)[a-z]+$"}, "pattern"),
    ({"type": "string", "pattern": r"(a)\1"}, "pattern"),
    ({"type": "string", "pattern": r"\bword\b"}, "pattern"),
    ({"type": "object", "patternProperties": {"^(?=a)": {}}}, "patternProperties"),
    ({"type": "integer", "minimum": 1e20}, "minimum"),
    ({"type": "number", "exclusiveMaximum": -(2**64)}, "exclusiveMaximum"),
    ({"type": "integer", "multipleOf": 1_000_003}, "multipleOf"),
    ({"oneOf": [STRING, {"type": "string", "maxLength": 3}]}, "oneOf"),
    ({"anyOf": [{"type": "array", "maxItems": i} for i in range(40)]}, "anyOf"),
    ({"$ref": "https://example.com/schema"}, "$ref"),
    ({"type": "any"}, "type"),
    ({"items": None, "type": "array"}, "items"),
    ({"type": "string", "maxLength": -1}, "maxLength"),
]


@pytest.mark.parametrize(("schema", "keyword"), DROPPED)
def test_keywords_that_cannot_be_enforced_are_dropped_and_reported(schema: Json, keyword: str) -> None:
    ignored = compiled(of_property(schema), other=of_property(STRING)).ignored
    assert f"tools.f.parameters.properties.a.{keyword}" in ignored
    within = {"type": "object", "properties": {"x": {"$ref": "#/$defs/X"}}, "$defs": {"X": of_property(schema)}}
    assert f"tools.f.parameters.$defs.X.properties.a.{keyword}" in compiled(within).ignored


UNCONSTRAINING: list[Json] = [
    {"type": "object", "propertyNames": STRING},
    {"type": "object", "propertyNames": {"type": "string", "description": "a name"}},
    {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
    {"type": "integer", "minimum": 0, "maximum": 2**64 - 1},
    {"type": "number", "minimum": -1.7976931348623157e308, "maximum": 1e20},
    {"type": "number", "exclusiveMinimum": -(10**30), "exclusiveMaximum": 10**400},
    {"type": "string", "maxLength": 2**64},
    {"type": "array", "maxItems": 2.0, "minItems": 1.0, "items": STRING},
    {"type": "object", "unevaluatedProperties": True, "dependentRequired": {}, "if": {"required": ["x"]}},
    {"type": "array", "contains": {}, "minContains": 0, "unevaluatedItems": {}},
    {"$dynamicAnchor": "node", "type": "object"},
]


@pytest.mark.parametrize("schema", UNCONSTRAINING)
def test_keywords_that_constrain_nothing_are_accepted_under_strict_too(schema: Json) -> None:
    assert not compiled(of_property(schema), is_strict=True).ignored
    assert not compiled(of_property(schema)).ignored


@pytest.mark.parametrize(("schema", "keyword"), DROPPED)
def test_strict_and_response_format_refuse_by_path_without_llguidances_terms(schema: Json, keyword: str) -> None:
    if keyword == "uniqueItems":
        pytest.skip("an annotation, like formats")
    for grammar, place in (
        (ToolCalls({"f": arguments(of_property(schema), is_strict=True)}), "f.parameters.properties.a"),
        (JsonSchema(of_property(schema)), "properties.a"),
    ):
        message = refusal(grammar)
        assert message.startswith(f"the_field: {place}: ")
        assert not any(word in message for word in ("Some(", "None", "option", "coerce", "Regex"))


def test_the_other_keywords_are_still_enforced() -> None:
    schema = {"type": "object", "properties": {"a": {"not": STRING, "enum": [1, 2]}}, "required": ["a"]}
    constraint = compiled(schema).constraint
    assert constraint is not None
    for token_id in token_ids('{"name": "f", "arguments": {"a":'):
        constraint.advance(token_id)
    assert [byte for byte in range(256) if allows(constraint, 1 + byte)] == [*b"12"]
