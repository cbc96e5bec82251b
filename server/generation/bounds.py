"""Bounds on grammars, which cost time when compiled and again at every token. Tokenizer-independent."""

import json
import math
import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

from server.generation.json_schema import DEFINITIONS, LISTS, NAMED, SINGLE, Schema

MAX_CHARACTERS = 100_000
MAX_DEPTH = 100
MAX_ALTERNATIVES = 32
"""Alternatives of one `anyOf` or `oneOf`, constants excluded: in a recursive schema each token costs their square."""

MAX_OPTIONAL_PROPERTIES = 500
"""Properties of one object: each may come next."""

MAX_PATTERNS = 16
"""Distinct patterns of a schema. Merging schemas intersects them, at a cost exponential in their number."""

MAX_MULTIPLE = 10_000
"""Bound on the least common multiple of all `multipleOf` without decimal places: the number of states of a number."""

SURROGATES = re.compile("[\ud800-\udfff]")


class UnusableGrammar(ValueError):
    """The message says why the grammar cannot be used."""


def subschemas(schema: Schema) -> Iterator[tuple[str, Schema]]:
    """The schemas inside a schema, by their place."""
    for key, value in schema.items():
        if key in DEFINITIONS:
            continue
        named = value if isinstance(value, Mapping) else dict(enumerate(value)) if isinstance(value, list) else {}
        if key in SINGLE and isinstance(value, Mapping):
            yield key, value
        elif key in (*NAMED, *LISTS):
            yield from ((f"{key}.{name}", child) for name, child in named.items() if isinstance(child, Mapping))


def check_size(schema: Schema) -> int:
    """The schema as text. Raises `UnusableGrammar` if it is too long or nested too deeply."""
    for _ in nodes(schema):
        pass
    size = len(json.dumps(schema))
    check(size <= MAX_CHARACTERS, f"{size} characters are more than the {MAX_CHARACTERS} allowed")
    return size


def check_bounds(schema: Schema) -> None:
    """Raise `UnusableGrammar` for a schema that would be slow to compile or to follow."""
    patterns, multiples = set[str](), set[int]()
    for node in nodes(schema):
        check_alternatives(node)
        check_properties(node)
        patterns.update(patterns_of(node))
        multiples.update(multiples_of(node))
    message = f"{len(patterns)} different patterns and formats are more than the {MAX_PATTERNS} allowed"
    check(len(patterns) <= MAX_PATTERNS, message)
    message = f"the least common multiple of all multipleOf must be at most {MAX_MULTIPLE}"
    check(math.lcm(*multiples) <= MAX_MULTIPLE, message)


def nodes(schema: Schema) -> Iterator[Mapping[str, Any]]:
    """Every object in a schema, breadth first. Raises `UnusableGrammar` where it is nested too deeply."""
    level: list[Any] = [schema]
    for _ in range(MAX_DEPTH):
        yield from (node for node in level if isinstance(node, Mapping))
        level = [child for node in level for child in children(node)]
    check(not level, f"nested deeper than {MAX_DEPTH} levels")


def children(node: Any) -> list[Any]:
    if isinstance(node, Mapping):
        return list(node.values())
    return node if isinstance(node, list) else []


def check_alternatives(node: Schema) -> None:
    for keyword in ("anyOf", "oneOf"):
        alternatives = node.get(keyword)
        alternatives = alternatives if isinstance(alternatives, list) else []
        num_open = sum(not is_constant(alternative) for alternative in alternatives)
        message = f"{keyword} has {num_open} alternatives besides constants; {MAX_ALTERNATIVES} are allowed"
        check(num_open <= MAX_ALTERNATIVES, message)


def check_properties(node: Schema) -> None:
    properties, required = node.get("properties"), node.get("required")
    num_required = len(required) if isinstance(required, list) else 0
    num_optional = len(properties) - num_required if isinstance(properties, Mapping) else 0
    message = f"an object has {num_optional} optional properties; {MAX_OPTIONAL_PROPERTIES} are allowed"
    check(num_optional <= MAX_OPTIONAL_PROPERTIES, message)


def is_constant(schema: Any) -> bool:
    return isinstance(schema, Mapping) and ("const" in schema or "enum" in schema)


def patterns_of(node: Schema) -> Iterator[str]:
    """The regular expressions of a schema's node, formats included."""
    yield from (node[keyword] for keyword in ("pattern", "format") if isinstance(node.get(keyword), str))
    by_pattern = node.get("patternProperties")
    yield from by_pattern if isinstance(by_pattern, Mapping) else ()


def multiples_of(node: Schema) -> Iterator[int]:
    """The digits of `multipleOf`, without the decimal point and the zeros at the end."""
    multiple = node.get("multipleOf")
    is_finite = type(multiple) is int or (isinstance(multiple, float) and math.isfinite(multiple))
    if multiple and is_finite:
        digits = Decimal(str(multiple)).normalize().as_tuple().digits
        yield int("".join(map(str, digits)))


def check_text(text: str) -> None:
    check(len(text) <= MAX_CHARACTERS, f"{len(text)} characters are more than the {MAX_CHARACTERS} allowed")
    check(not SURROGATES.search(text), "holds half of a surrogate pair, which is no character")


def check(condition: bool, message: str) -> None:
    """Raise `UnusableGrammar` unless the condition holds."""
    if not condition:
        raise UnusableGrammar(message)
