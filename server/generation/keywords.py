"""Finds the keywords in a JSON schema that llguidance cannot enforce. Independent of tokens, engines and HTTP."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from server.generation.json_schema import ANNOTATIONS, DEFINITIONS, LISTS, NAMED, SINGLE, Preparation, Schema

UPPER, LOWER = ("maximum", "exclusiveMaximum"), ("minimum", "exclusiveMinimum")
COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
MAX_BOUND = 2**63 - 1
"""llguidance cannot enforce numeric bounds whose absolute value is this or more."""

MAX_COUNT = 10**9
"""Larger maximum counts are ignored, because no answer is long enough to reach them."""


def enforceable(schema: Schema, *, drops: bool) -> tuple[dict[str, Any], list[str]]:
    """Remove keywords that constrain nothing. Return the schema and the paths of its unenforced keywords.

    With `drops`, remove also the keywords that llguidance cannot enforce, and include their paths.
    """
    filter_ = KeywordFilter(Preparation(schema, closes=True, is_strict=False), drops=drops)
    return filter_.apply(schema, ""), filter_.ignored


@dataclass(frozen=True)
class KeywordFilter:
    preparation: Preparation
    drops: bool
    ignored: list[str] = field(default_factory=list)

    def apply(self, node: Any, place: str) -> Any:
        if not isinstance(node, Mapping):
            return node
        if self.preparation.may_repeat(node):
            self.ignored.append(f"{place}uniqueItems")
        kept = {}
        for key, value in node.items():
            if self.drops and constrains(node, key, value) and is_unenforceable(key, value):
                self.ignored.append(place + key)
            elif constrains(node, key, value):
                kept[key] = self._value(key, value, place + key)
        return kept

    def _value(self, key: str, value: Any, place: str) -> Any:
        if key in (*NAMED, *DEFINITIONS) and isinstance(value, Mapping):
            return {name: self.apply(child, f"{place}.{name}.") for name, child in value.items()}
        if key in (*LISTS, *SINGLE) and isinstance(value, list):
            return [self.apply(child, f"{place}.{number}.") for number, child in enumerate(value)]
        if key in SINGLE:
            return self.apply(value, f"{place}.")
        return int(value) if key in COUNTS and isinstance(value, float) and value.is_integer() else value


def constrains(node: Schema, key: str, value: Any) -> bool:
    """Return whether the keyword could exclude a value that the model can generate."""
    if key in (*UPPER, *LOWER) and is_number(value):
        return not (value >= MAX_BOUND if key in UPPER else value <= -MAX_BOUND)
    if key in COUNTS and key.startswith("max") and is_number(value):
        return bool(value <= MAX_COUNT)
    return key not in MAY_CONSTRAIN or MAY_CONSTRAIN[key](node, value)


def has_dependents(_: Schema, value: Any) -> bool:
    return not isinstance(value, Mapping) or any(each not in ([], {}, True) for each in value.values())


MAY_CONSTRAIN: dict[str, Callable[[Schema, Any], bool]] = {
    "propertyNames": lambda _, value: not is_anything(value, also={"type": "string"}),
    **dict.fromkeys(("unevaluatedItems", "unevaluatedProperties"), lambda _, value: not is_anything(value)),
    "if": lambda node, _: not (is_anything(node.get("then", True)) and is_anything(node.get("else", True))),
    **dict.fromkeys(("then", "else"), lambda node, value: "if" in node and not is_anything(value)),
    "not": lambda _, value: value is not False,
    "contains": lambda node, _: node.get("minContains") != 0 or "maxContains" in node,
    "minContains": lambda node, value: "contains" in node and value != 0,
    "maxContains": lambda node, _: "contains" in node,
    **dict.fromkeys(("dependencies", "dependentRequired", "dependentSchemas"), has_dependents),
    **dict.fromkeys(("$dynamicAnchor", "$recursiveAnchor"), lambda *_: False),
}
"""Keywords that llguidance does not support. The function returns whether the keyword constrains its schema."""


def is_unenforceable(key: str, value: Any) -> bool:
    return key in (*MAY_CONSTRAIN, "$dynamicRef", "$recursiveRef") or (
        key in (*UPPER, *LOWER) and is_number(value) and abs(value) >= MAX_BOUND
    )


def is_anything(schema: Any, also: Schema | None = None) -> bool:
    """Return whether the schema allows every value. Assume that `also` is such a schema."""
    if isinstance(schema, Mapping):
        return {key: value for key, value in schema.items() if key not in ANNOTATIONS} in ({}, also)
    return schema is True


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
