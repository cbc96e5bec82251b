"""What an answer may be asked to be, and the grammar that says so in llguidance's language.

JSON is written without whitespace between its parts, so that a small model cannot write blanks for ever; the order of
properties is that of the schema. Since a grammar costs time when it is compiled and again with every token, what is
asked is bounded here; the bounds stand where compiling takes a fraction of a second and a token some milliseconds.
Knows nothing of tokens, engines or HTTP.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Protocol

from llguidance import regex_to_lark

from nvium_core.text.tool_calls import BEGINNING, END, MIDDLE

Schema = Mapping[str, Any]

MAX_CHARACTERS = 100_000
MAX_DEPTH = 100
MAX_ALTERNATIVES = 32
"""Of one `anyOf` or `oneOf`, constants aside: those of a recursive schema cost their square with every token."""

MAX_OPTIONAL_PROPERTIES = 500
"""Of one object: any of them may come next."""

MAX_PATTERNS = 16
"""Different ones in a schema. Where schemas are merged they are intersected, which costs two to their number."""

MAX_MULTIPLE = 10_000
"""Of the least common multiple of all `multipleOf`, decimal places aside: as many states the number then has."""

FUNCTION_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")

SURROGATES = re.compile("[\ud800-\udfff]")

HEADER = '%llguidance {"no_forcing": true}\nstart: '
"""Unforced, what must come is still spelled as the model likes; looking for it would cost as much as it is long."""

COMPACT = {"whitespace_flexible": False}


class UnusableGrammar(ValueError):
    """What is asked of the answer cannot be had; the message says why."""


class Grammar(Protocol):
    """One thing that can be asked of an answer."""

    def text(self) -> str:
        """In llguidance's variant of Lark. Raises `UnusableGrammar`."""
        ...


@dataclass(frozen=True)
class JsonSchema:
    """JSON that a schema describes; the default is any object."""

    schema: Schema

    def text(self) -> str:
        return HEADER + json_rule(self.schema)


ANY_OBJECT = JsonSchema({"type": "object"})


@dataclass(frozen=True)
class Regex:
    """Text that the pattern matches as a whole, in the syntax of Rust's regex crate; there are no look-arounds."""

    pattern: str

    def text(self) -> str:
        check(self.pattern != "", "must not be empty")
        check_text(self.pattern)
        num_backslashes = len(self.pattern) - len(self.pattern.rstrip("\\"))
        check(num_backslashes % 2 == 0, "ends within an escape")
        return f"{HEADER}/{regex_to_lark(self.pattern, '')}/"


@dataclass(frozen=True)
class Choice:
    """One of these texts."""

    options: Sequence[str]

    def text(self) -> str:
        check(len(self.options) > 0, "must hold at least one text")
        check(all(self.options), "none of the texts may be empty")
        check_text("".join(self.options))
        return f"{HEADER}CHOICE\nCHOICE: {' | '.join(map(json.dumps, self.options))}"


@dataclass(frozen=True)
class ToolCall:
    """A call of one of these functions, by name, with arguments as its schema describes them (None: any object)."""

    functions: Mapping[str, Schema | None]

    def text(self) -> str:
        check(len(self.functions) > 0, "must hold at least one function")
        calls = " | ".join(call_rule(name, parameters or {}) for name, parameters in self.functions.items())
        check_text(calls)
        return HEADER + calls


def call_rule(name: str, parameters: Schema) -> str:
    is_name = FUNCTION_NAME.fullmatch(name) is not None
    check(is_name, f"a function's name must be 1 to 64 letters, digits, _ or -, got {name[:100]!r}")
    is_object = parameters.get("type", "object") == "object"
    check(is_object, f"the parameters of {name} must be an object, got type {str(parameters.get('type'))[:100]}")
    arguments = json_rule({"type": "object", **parameters})
    return f"{json.dumps(BEGINNING + name + MIDDLE)} {arguments} {json.dumps(END)}"


def json_rule(schema: Schema) -> str:
    check_bounds(schema)
    try:
        text = json.dumps({**schema, "x-guidance": COMPACT}, allow_nan=False)
    except ValueError as error:
        raise UnusableGrammar("JSON has no NaN and no infinity") from error
    check_text(text)
    return f"%json {text}"


def check_bounds(schema: Schema) -> None:
    """Refuse what would take long to compile or to follow."""
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
    """Every object in a schema. Raises `UnusableGrammar` where it is nested too deeply."""
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
    """The regular expressions that a schema's node brings along, formats among them."""
    yield from (node[keyword] for keyword in ("pattern", "format") if isinstance(node.get(keyword), str))
    by_pattern = node.get("patternProperties")
    yield from by_pattern if isinstance(by_pattern, Mapping) else ()


def multiples_of(node: Schema) -> Iterator[int]:
    """The digits of `multipleOf`, without the decimal point and the zeros at the end."""
    multiple = node.get("multipleOf")
    if isinstance(multiple, int | float) and math.isfinite(multiple) and multiple:
        digits = Decimal(str(multiple)).normalize().as_tuple().digits
        yield int("".join(map(str, digits)))


def check_text(text: str) -> None:
    check(len(text) <= MAX_CHARACTERS, f"{len(text)} characters are more than the {MAX_CHARACTERS} allowed")
    check(not SURROGATES.search(text), "holds half of a surrogate pair, which is no character")


def check(condition: bool, message: str) -> None:
    """Raise `UnusableGrammar` unless the condition holds."""
    if not condition:
        raise UnusableGrammar(message)
