"""How schemas are interpreted, tested by the texts that they accept. Tools without `strict` accept any schema."""

import json
from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, Field, SecretStr

from server.structured_outputs.bounds import enforceable
from server.structured_outputs.constraints import RequestConstraint
from server.structured_outputs.grammars import JsonSchema, Schema, ToolCalls, arguments
from server.structured_outputs.json_schema import UnusableGrammar
from tests.byte_model import token_ids
from tests.server.raw_client import Json
from tests.server.structured_outputs.test_constraints import allows, is_answer, loaded, refusal

A: Json = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
B: Json = {"type": "object", "properties": {"b": {"type": "integer"}}}
NODE: Json = {
    "type": "object",
    "properties": {"n": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "null"}]}},
    "required": ["n", "next"],
}
DEFINED = {"$defs": {"A": A, "B": B, "Node": NODE}}


def allowed(schema: Json, *values: Json, **how: bool) -> list[bool]:
    return [is_answer(JsonSchema(schema, **how), json.dumps(value, separators=(",", ":"))) for value in values]


def test_an_object_is_closed_if_it_declares_properties_or_is_strict():
    assert allowed({"type": "object"}, {"x": 1}) == [True]
    assert allowed({"type": "object"}, {}, {"x": 1}, is_strict=True) == [True, False]
    assert allowed(A, {"a": 1}, {"a": 1, "x": 2}) == [True, False]
    assert allowed({"type": "object", "properties": {}}, {}, {"x": 1}) == [True, False]
    assert allowed(A | {"additionalProperties": True}, {"a": 1, "x": 2}) == [True]


@pytest.mark.parametrize(
    "schema", [{"allOf": [A, B]}, {"allOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}]}, {"$ref": "#/$defs/A"} | B]
)
def test_merged_schemas_are_closed_as_one_object(schema):
    assert allowed(DEFINED | schema, {"a": 1}, {"a": "1"}, {"a": 1, "c": 2}) == [True, False, False]
    assert any(allowed(DEFINED | schema, {"a": 1, "b": 2}, {"b": 2, "a": 1}))


def test_a_definition_is_closed_where_it_is_used_at_every_depth_and_open_where_it_is_merged():
    schema = DEFINED | {"type": "object", "properties": {"x": {"$ref": "#/$defs/A"}, "y": {"allOf": [A, B]}}}
    assert allowed(schema, {"x": {"a": 1}}, {"x": {"a": 1, "b": 2}}, {"y": {"a": 1, "b": 2}}) == [True, False, True]
    assert allowed(schema, {"y": {"a": 1, "c": 2}}, {"z": 1}) == [False, False]
    recursive, inner = DEFINED | {"$ref": "#/$defs/Node"}, {"n": 2, "next": None}
    assert allowed(recursive, {"n": 1, "next": inner}, {"n": 1, "next": inner | {"x": 1}}) == [True, False]


def test_an_all_of_with_one_member_is_that_member():
    """pydantic 1 writes one around the reference of a field that has a description."""
    either = {"anyOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}]}
    wrapped = {"allOf": [{"$ref": "#/$defs/E"}], "title": "X"}
    schema = {"$defs": DEFINED["$defs"] | {"E": either}, "type": "object", "properties": {"x": wrapped}}
    assert allowed(schema, {"x": {"a": 1}}, {"x": {"b": 1}}, {"x": {"a": 1, "c": 1}}) == [True, True, False]


def test_alternatives_are_closed_individually_and_with_their_shared_properties():
    assert allowed({"anyOf": [A, B]}, {"a": 1}, {"b": 1}, {"a": 1, "b": 1}) == [True, True, False]
    shared = {"type": "object", "properties": {"k": {"type": "integer"}}, "anyOf": [A, B]}
    assert allowed(shared, {"k": 1, "a": 1}, {"k": 1, "c": 1}) == [True, False]
    assert allowed(shared, {"k": 1, "a": 1, "b": "no integer"}, {"k": 1, "a": 1, "b": 2}) == [False, False]
    referred = DEFINED | shared | {"anyOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}]}
    assert allowed(referred, {"k": 1, "a": 1}, {"k": 1, "b": 1}, {"k": 1, "a": 1, "b": "x"}) == [True, True, False]
    assert allowed(shared | {"additionalProperties": True}, {"k": 1, "a": 1, "b": "free"}) == [True]


@pytest.mark.parametrize("name", ["path", "password", "binary", "json-pointer", "iri", "int32", "regex", "my-own"])
def test_a_format_that_cannot_be_checked_is_an_annotation(name):
    assert is_answer(JsonSchema({"type": "string", "format": name}), '"x y"')
    assert not is_answer(JsonSchema({"type": "string", "format": "date"}), '"x y"')


def test_one_of_supports_exclusive_alternatives():
    constants = {"oneOf": [{"const": "a", "title": "A"}, {"enum": ["b", 1]}]}
    assert [is_answer(JsonSchema(constants), text) for text in ('"a"', '"b"', "1", '"c"')] == [True, True, True, False]
    kinds = [{"type": "object", "properties": {"k": {"const": x}, "v": {}}, "required": ["k"]} for x in "XY"]
    tagged = {"oneOf": [{"$ref": "#/$defs/X"}, {"$ref": "#/$defs/Y"}], "discriminator": {"propertyName": "k"}}
    tagged |= {"$defs": dict(zip("XY", kinds, strict=True))}
    assert allowed(tagged, {"k": "X"}, {"k": "Y"}, {"k": "Z"}) == [True, True, False]
    assert is_answer(JsonSchema({"oneOf": [{"type": ["string", "null"]}, {"type": "integer"}]}), "1")
    assert "oneOf" in refusal(JsonSchema({"oneOf": [{"type": "integer"}, {"type": "number"}]}))


def test_a_discriminator_with_a_default_is_required():
    class Cat(BaseModel):
        kind: Literal["cat"] = "cat"
        lives: int

    class Dog(BaseModel):
        kind: Literal["dog"] = "dog"
        tricks: int = 0

    class Owner(BaseModel):
        pet: Annotated[Cat | Dog, Field(discriminator="kind")]

    pets: list[Json] = [{"kind": "cat", "lives": 9}, {"kind": "dog"}, {"lives": 9}, {"kind": "dog", "lives": 9}]
    assert allowed(Owner.model_json_schema(), *({"pet": pet} for pet in pets)) == [True, True, False, False]


def test_pattern_properties_constrain_names_and_values():
    schema = {"type": "object", "patternProperties": {"^[ab]_(x|y)?$": {"type": "integer"}}}
    closed = schema | {"additionalProperties": False}
    assert allowed(closed, {"a_": 1, "b_y": 2}, {"a_": "1"}, {"c_": 1}) == [True, False, False]
    declared = {"score": {"type": "integer", "multipleOf": 5}}
    both = closed | {"properties": declared, "required": ["score"], "patternProperties": {"^score$": {"maximum": 20}}}
    assert allowed(both, {"score": 20}, {"score": 3}, {"score": 25}, {}) == [True, False, False, False]


def test_unique_items_and_unknown_formats_are_reported_as_ignored():
    schema = {"type": "array", "uniqueItems": True, "items": {"type": "string"}}
    assert is_answer(JsonSchema(schema), '["a","a"]')
    within = {"type": "object", "properties": {"a": schema, "b": schema | {"uniqueItems": False, "format": "zip"}}}
    ignored = list[str]()
    enforceable(within, "", ignored, drops=False)
    assert ignored == ["properties.a.uniqueItems", "properties.b.format"]


class Modelled(BaseModel):
    path: Path
    secret: SecretStr
    raw: bytes
    names: set[str]
    kind: Literal["a", "b"] | None = None


def test_schemas_of_common_pydantic_types_are_accepted():
    text = '{"path":"/x","secret":"s","raw":"r","names":["a"],"kind":null}'
    assert is_answer(JsonSchema(Modelled.model_json_schema()), text)
    Modelled.model_validate_json(text)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": ["a"]},
        {"$ref": "#/$defs/A", "properties": ["a"]} | DEFINED,
        {"properties": {"a": {}}, "anyOf": [{"properties": ["b"]}, {"properties": {"c": {}}}]},
        {"oneOf": [{"type": "object", "properties": 3, "required": 4}, A]},
        {"properties": "x", "patternProperties": {"^x$": {}}},
        {"allOf": [{"properties": [1]}, A]},
    ],
)
def test_properties_that_are_not_an_object_are_refused(schema):
    assert refusal(JsonSchema(schema))


CHAIN = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}, {"minItems": 0}]} for i in range(1_000)}
LARGE = {"properties": {f"p{i}": {"const": 1} for i in range(2_000)}}
PAIRS = [{"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]} for _ in range(1_000)]


MERGED: list[Json] = [{"$defs": CHAIN, "$ref": "#/$defs/d0", "properties": {"x": {}}}]
MERGED += [{"$defs": {"a": LARGE, "b": LARGE}, "allOf": PAIRS}]


@pytest.mark.parametrize("schema", MERGED, ids=["chain", "pairs"])
def test_schemas_that_merge_too_many_schemas_are_refused(schema):
    with pytest.raises(UnusableGrammar, match="too many schemas"):
        JsonSchema(schema).text()


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
    ({"type": "object", "dependencies": {"x": ["y"]}}, "dependencies"),
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
def test_keywords_that_cannot_be_enforced_are_dropped_and_reported(schema, keyword):
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
    {"$dynamicAnchor": "node", "type": "object"},
    {"type": "object", "then": {"required": ["y"]}, "else": False, "minContains": 2},
    {"type": "object", "if": {"required": ["x"]}},
    {"type": "object", "unevaluatedProperties": True, "not": False, "dependentRequired": {}},
]


@pytest.mark.parametrize("schema", UNCONSTRAINING)
def test_keywords_that_constrain_nothing_are_accepted_under_strict_too(schema):
    assert not compiled(of_property(schema), is_strict=True).ignored
    assert not compiled(of_property(schema)).ignored


@pytest.mark.parametrize(("schema", "keyword"), DROPPED)
def test_strict_and_response_format_refuse_by_path_without_llguidances_terms(schema, keyword):
    if keyword == "uniqueItems":
        pytest.skip("an annotation, like formats")
    strict = ToolCalls({"f": arguments(of_property(schema), is_strict=True)})
    for grammar, place in ((strict, "f.parameters.properties.a"), (JsonSchema(of_property(schema)), "properties.a")):
        message = refusal(grammar)
        assert message.startswith(f"the_field: {place}: ")
        assert not any(word in message for word in ("Some(", "None", "option", "coerce", "Regex"))


def test_the_other_keywords_are_still_enforced():
    schema = {"type": "object", "properties": {"a": {"not": STRING, "enum": [1, 2]}}, "required": ["a"]}
    constraint = compiled(schema).constraint
    assert constraint is not None
    for token_id in token_ids('{"name": "f", "arguments": {"a":'):
        constraint.advance(token_id)
    assert [byte for byte in range(256) if allows(constraint, 1 + byte)] == [*b"12"]
