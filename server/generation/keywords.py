"""Finds the keywords of a JSON schema that cannot be enforced. Knows no tokens, engines or HTTP."""

from collections.abc import Callable, Mapping
from typing import Any

from server.generation.json_schema import ANNOTATIONS, DEFINITIONS, LISTS, NAMED, SINGLE, Preparation, Schema

UPPER, LOWER = ("maximum", "exclusiveMaximum"), ("minimum", "exclusiveMinimum")
COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
REACH = 2**63 - 1
"""Numbers from here on have no bounds in llguidance."""

MAX_COUNT = 10**9
"""Bounds beyond this exceed any answer's length."""


def enforceable(schema: Schema, *, drops: bool) -> tuple[dict[str, Any], list[str]]:
    """The schema without what constrains nothing, such as bounds out of reach, and the places of what is not enforced:
    `uniqueItems`, and with `drops` all keywords that are known to be unenforceable, which are left out too."""
    reader = Reader(Preparation(schema, closes=True, is_strict=False), drops=drops)
    return reader.read(schema, ""), reader.ignored


class Reader:
    def __init__(self, preparation: Preparation, *, drops: bool) -> None:
        self.ignored: list[str] = []
        self._preparation = preparation
        self._drops = drops

    def read(self, node: Any, place: str) -> Any:
        if not isinstance(node, Mapping):
            return node
        if self._preparation.may_repeat(node):
            self.ignored.append(f"{place}uniqueItems")
        kept = {}
        for key, value in node.items():
            if self._drops and constrains(node, key, value) and is_unenforceable(key, value):
                self.ignored.append(place + key)
            elif constrains(node, key, value):
                kept[key] = self._value(key, value, place + key)
        return kept

    def _value(self, key: str, value: Any, place: str) -> Any:
        if key in (*NAMED, *DEFINITIONS) and isinstance(value, Mapping):
            return {name: self.read(child, f"{place}.{name}.") for name, child in value.items()}
        if key in (*LISTS, *SINGLE) and isinstance(value, list):
            return [self.read(child, f"{place}.{number}.") for number, child in enumerate(value)]
        if key in SINGLE:
            return self.read(value, f"{place}.")
        return int(value) if key in COUNTS and isinstance(value, float) and value.is_integer() else value


def constrains(node: Schema, key: str, value: Any) -> bool:
    """Whether the keyword may exclude a value within reach."""
    if key in (*UPPER, *LOWER) and is_number(value):
        return not (value >= REACH if key in UPPER else value <= -REACH)
    if key in COUNTS and key.startswith("max") and is_number(value):
        return bool(value <= MAX_COUNT)
    return key not in MAY_CONSTRAIN or MAY_CONSTRAIN[key](node, value)


def needs(value: Any) -> bool:
    """Whether what depends on a property is anything at all."""
    return not isinstance(value, Mapping) or any(each not in ([], {}, True) for each in value.values())


MAY_CONSTRAIN: dict[str, Callable[[Schema, Any], bool]] = {
    "propertyNames": lambda _, value: not is_anything(value, also={"type": "string"}),
    "unevaluatedItems": lambda _, value: not is_anything(value),
    "unevaluatedProperties": lambda _, value: not is_anything(value),
    "if": lambda node, _: not (is_anything(node.get("then", True)) and is_anything(node.get("else", True))),
    "then": lambda node, value: "if" in node and not is_anything(value),
    "else": lambda node, value: "if" in node and not is_anything(value),
    "not": lambda _, value: value is not False,
    "contains": lambda node, _: node.get("minContains") != 0 or "maxContains" in node,
    "minContains": lambda node, value: "contains" in node and value != 0,
    "maxContains": lambda node, _: "contains" in node,
    "dependencies": lambda _, value: needs(value),
    "dependentRequired": lambda _, value: needs(value),
    "dependentSchemas": lambda _, value: needs(value),
    "$dynamicAnchor": lambda *_: False,
    "$recursiveAnchor": lambda *_: False,
}
"""Whether keywords that llguidance does not know do in a schema, by their values."""


def is_unenforceable(key: str, value: Any) -> bool:
    return key in (*MAY_CONSTRAIN, "$dynamicRef", "$recursiveRef") or (
        key in (*UPPER, *LOWER) and is_number(value) and abs(value) >= REACH
    )


def is_anything(schema: Any, also: Schema | None = None) -> bool:
    """Whether the schema describes every value."""
    if isinstance(schema, Mapping):
        return {key: value for key, value in schema.items() if key not in ANNOTATIONS} in ({}, also)
    return schema is True


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
