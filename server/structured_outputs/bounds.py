"""What llguidance can enforce of a JSON schema, and in what time: keywords, and limits on size.

`uniqueItems`, and a `format` that llguidance cannot check, are never enforced. Keywords that constrain nothing are
dropped. Independent of tokens, engines and HTTP.
"""

import math
import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

from server.structured_outputs.json_schema import (
    ANNOTATIONS,
    Schema,
    UnusableGrammar,
    declared,
    is_object,
    listed,
    rebuilt,
)

UPPER, LOWER = ("maximum", "exclusiveMaximum"), ("minimum", "exclusiveMinimum")
COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
MAX_BOUND = 2**63 - 1
"""llguidance cannot enforce numeric bounds whose absolute value is this or more."""

MAX_COUNT = 10**9
"""Larger maximum counts are ignored, because no answer is long enough to reach them."""

FORMATS = frozenset(
    ("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "unknown", "uri", "uuid")
)
"""Formats that llguidance checks."""

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

MAX_CHARACTERS = 100_000

MAX_DEPTH = 100

MAX_BRANCHES = 32
"""Maximum number of alternatives in `anyOf` or `oneOf`, not counting constants.

In a recursive schema, the time per token grows with the square of this number.
"""

MAX_OPTIONAL_PROPERTIES = 500  # maximum number of optional properties of one object

MAX_PATTERNS = 16
"""Maximum number of distinct patterns in a schema. Intersecting patterns of merged schemas takes exponential time."""

MAX_MULTIPLE = 10_000
"""Maximum least common multiple of the integers from `multiples_of`. llguidance needs that many states."""

SURROGATES = re.compile("[\ud800-\udfff]")


def enforceable(node: Any, place: str, ignored: list[str], *, drops: bool) -> Any:
    """Remove keywords that constrain nothing. Add the paths of unenforced keywords to `ignored`.

    With `drops`, remove also the keywords that llguidance cannot enforce, and add their paths. `node` is the part of a
    schema at `place`.
    """
    if not isinstance(node, Mapping):
        return node
    kept = dict[str, Any]()
    for key, value in node.items():
        if not constrains(key, value) or node.keys().isdisjoint(PARTNERS.get(key, (key,))):
            continue
        is_too_large = key in (*UPPER, *LOWER) and is_number(value) and abs(value) >= MAX_BOUND
        is_unchecked = key == "uniqueItems" or (key == "format" and isinstance(value, str) and value not in FORMATS)
        if is_unchecked or (drops and (is_too_large or key in UNSUPPORTED)):
            ignored.append(place + key)
        elif key in COUNTS and isinstance(value, float) and value.is_integer():
            kept[key] = int(value)
        else:
            kept[key] = rebuilt(key, value, lambda at, child: enforceable(child, f"{place}{at}.", ignored, drops=drops))
    return kept


def constrains(key: str, value: Any) -> bool:
    """Return whether the keyword could exclude a value that the model can generate."""
    if key in (*UPPER, *LOWER) and is_number(value):
        return not (value >= MAX_BOUND if key in UPPER else value <= -MAX_BOUND)
    if key in COUNTS and key.startswith("max") and is_number(value):
        return bool(value <= MAX_COUNT)
    if key == "propertyNames":
        return not allows_all_names(value)
    return key not in ("$dynamicAnchor", "$recursiveAnchor") and value not in NEUTRAL.get(key, ())


def allows_all_names(schema: Any) -> bool:
    named = {key: value for key, value in schema.items() if key not in ANNOTATIONS} if is_object(schema) else schema
    return named in ({}, {"type": "string"}, True)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_bounds(schema: Schema) -> None:
    """Raise `UnusableGrammar` if the schema would be slow to compile or to sample from."""
    patterns, multiples = set[str](), set[int]()
    for node in nodes(schema):
        for keyword in ("anyOf", "oneOf"):
            num_open = sum(not is_constant(alternative) for alternative in listed(node, keyword))
            message = f"{keyword} must have at most {MAX_BRANCHES} alternatives besides constants, got {num_open}"
            require(num_open <= MAX_BRANCHES, message)
        num_optional = len(declared(node)) - len(listed(node, "required"))
        message = f"an object must have at most {MAX_OPTIONAL_PROPERTIES} optional properties, got {num_optional}"
        require(num_optional <= MAX_OPTIONAL_PROPERTIES, message)
        patterns.update(patterns_of(node))
        multiples.update(multiples_of(node))
    message = f"must have at most {MAX_PATTERNS} distinct patterns and formats, got {len(patterns)}"
    require(len(patterns) <= MAX_PATTERNS, message)
    message = f"the least common multiple of all multipleOf must be at most {MAX_MULTIPLE}"
    require(math.lcm(*multiples) <= MAX_MULTIPLE, message)


def nodes(schema: Schema) -> Iterator[Mapping[str, Any]]:
    """Yield every JSON object in a schema, breadth first. Raise `UnusableGrammar` if the schema is too deep."""
    level: list[Any] = [schema]
    for _ in range(MAX_DEPTH):
        yield from (node for node in level if isinstance(node, Mapping))
        level = [child for node in level for child in children(node)]
    require(not level, f"must be nested at most {MAX_DEPTH} levels deep")


def children(node: Any) -> list[Any]:
    if isinstance(node, Mapping):
        return list(node.values())
    return node if isinstance(node, list) else []


def is_constant(schema: Any) -> bool:
    return isinstance(schema, Mapping) and ("const" in schema or "enum" in schema)


def patterns_of(node: Schema) -> Iterator[str]:
    yield from (node[keyword] for keyword in ("pattern", "format") if isinstance(node.get(keyword), str))
    by_pattern = node.get("patternProperties")
    yield from by_pattern if isinstance(by_pattern, Mapping) else ()


def multiples_of(node: Schema) -> Iterator[int]:
    """Yield the significant digits of a node's `multipleOf` as an integer: 25 for 0.25."""
    multiple = node.get("multipleOf")
    is_finite = type(multiple) is int or (isinstance(multiple, float) and math.isfinite(multiple))
    if multiple and is_finite:
        digits = Decimal(str(multiple)).normalize().as_tuple().digits
        yield int("".join(map(str, digits)))


def check_text(text: str) -> None:
    require(len(text) <= MAX_CHARACTERS, f"must have at most {MAX_CHARACTERS} characters, got {len(text)}")
    require(not SURROGATES.search(text), "must not contain lone surrogates")


def require(condition: bool, message: str) -> None:
    if not condition:
        raise UnusableGrammar(message)
