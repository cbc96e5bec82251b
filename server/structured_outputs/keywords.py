"""Finds the keywords in a JSON schema that are not enforced: llguidance cannot, or they constrain nothing.

`uniqueItems`, and a `format` that llguidance cannot check, are never enforced. Independent of tokens, engines and HTTP.
"""

from collections.abc import Mapping
from typing import Any

from server.structured_outputs.json_schema import ANNOTATIONS, Schema, is_object, rebuilt

UPPER, LOWER = ("maximum", "exclusiveMaximum"), ("minimum", "exclusiveMinimum")
COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
MAX_BOUND = 2**63 - 1
"""llguidance cannot enforce numeric bounds whose absolute value is this or more."""

MAX_COUNT = 10**9
"""Larger maximum counts are ignored, because no answer is long enough to reach them."""

FORMATS = frozenset(
    ("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "unknown", "uri", "uuid")
)
"""Formats that llguidance checks. Other formats are annotations."""

UNSUPPORTED = (
    *("not", "if", "then", "else", "propertyNames", "dependencies", "dependentRequired", "dependentSchemas"),
    *("contains", "minContains", "maxContains", "unevaluatedItems", "unevaluatedProperties"),
    *("$dynamicRef", "$recursiveRef"),
)
"""Keywords that llguidance does not support."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("not", "uniqueItems"), (False,)),
    **dict.fromkeys(("unevaluatedItems", "unevaluatedProperties"), (True, {})),
    **dict.fromkeys(("dependencies", "dependentRequired", "dependentSchemas"), ({},)),
}
"""Values of unsupported keywords that constrain nothing."""

PARTNERS = {
    "if": ("then", "else"),
    **dict.fromkeys(("then", "else"), ("if",)),
    **dict.fromkeys(("minContains", "maxContains"), ("contains",)),
}
"""Keywords that constrain nothing unless the schema also has one of these."""


def enforceable(schema: Schema, *, drops: bool) -> tuple[dict[str, Any], list[str]]:
    """Remove keywords that constrain nothing. Return the schema and the paths of its unenforced keywords.

    With `drops`, remove also the keywords that llguidance cannot enforce, and include their paths.
    """
    ignored = list[str]()
    return enforced(schema, "", ignored, drops=drops), ignored


def enforced(node: Any, place: str, ignored: list[str], *, drops: bool) -> Any:
    """Apply `enforceable` to the part of a schema at `place`, and add unenforced keywords to `ignored`."""
    if not isinstance(node, Mapping):
        return node
    kept = dict[str, Any]()
    for key, value in node.items():
        if not constrains(key, value) or node.keys().isdisjoint(PARTNERS.get(key, (key,))):
            continue
        is_too_large = key in (*UPPER, *LOWER) and is_number(value) and abs(value) >= MAX_BOUND
        if key == "uniqueItems" or (drops and (is_too_large or key in UNSUPPORTED)):
            ignored.append(place + key)
        elif key in COUNTS and isinstance(value, float) and value.is_integer():
            kept[key] = int(value)
        else:
            kept[key] = rebuilt(key, value, lambda at, child: enforced(child, f"{place}{at}.", ignored, drops=drops))
    return kept


def constrains(key: str, value: Any) -> bool:
    """Return whether the keyword could exclude a value that the model can generate."""
    if key in (*UPPER, *LOWER) and is_number(value):
        return not (value >= MAX_BOUND if key in UPPER else value <= -MAX_BOUND)
    if key in COUNTS and key.startswith("max") and is_number(value):
        return bool(value <= MAX_COUNT)
    if key == "format" and isinstance(value, str):
        return value in FORMATS
    if key == "propertyNames":
        return not allows_all_names(value)
    return key not in ("$dynamicAnchor", "$recursiveAnchor") and value not in NEUTRAL.get(key, ())


def allows_all_names(schema: Any) -> bool:
    named = {key: value for key, value in schema.items() if key not in ANNOTATIONS} if is_object(schema) else schema
    return named in ({}, {"type": "string"}, True)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
