"""Forms of answers: compiled or refused by name; followed token by token, whatever may be said can be said."""

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from nvium_core import TooCostly
from nvium_core.text.tool_calls import HERMES, LLAMA, MISTRAL, MISTRAL_CALL_ID, PLAIN
from server.errors import InvalidField
from server.generation.constraints import Constraints, GrammarConstraint
from server.generation.grammars import Grammar, JsonSchema, Lark, OneOf, Regex, Signature, ToolCalls, Without
from tests.byte_model import load_byte_model
from tests.fuzzing.choices import Choices
from tests.server.fuzz import BAD_REGEXES, BAD_SCHEMAS, REGEXES, SCHEMAS, with_something_odd

KINDS = ("regex", "choice", "lark", "schema", "without", "calls", "odd schema")
FORMATS = (PLAIN, HERMES, LLAMA, MISTRAL, MISTRAL_CALL_ID)
STEP_BYTES = 24
"""At the end of an input, each of which chooses a token."""

GRAMMARS = [
    'start: "a" | B\nB: /[0-9]+/',
    'root ::= ("a" | [b-d]){2,5} "x"?',
    'start: x\nx: x x | "a"',
    "start: %json {}",
]
MORE_SCHEMAS = [
    {"type": "object", "properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": {"type": ["null", "integer"]}}},
    {"type": "string", "format": "date-time", "minLength": 2},
    {"type": "number", "multipleOf": 0.5, "exclusiveMinimum": 0},
    {"oneOf": [{"const": {"a": [1]}}, {"type": "array", "prefixItems": [{}, {"type": "boolean"}], "minItems": 2}]},
    {"allOf": [{"properties": {"a": {}}}, {"patternProperties": {"^b": {"type": "null"}}}], "required": ["a"]},
]


def seeds() -> Iterator[bytes]:
    texts: dict[str, list[str]] = {
        "regex": [*REGEXES, *BAD_REGEXES, r"(?i)[^\x00-\x7f]{2,}|\bx\d", "(a|b|ab){3}c*"],
        "choice": ["a\nb", "ab\nabc\n", "é"],
        "lark": GRAMMARS,
        "schema": [json.dumps(schema) for schema in [*SCHEMAS, *BAD_SCHEMAS[:12], *MORE_SCHEMAS]],
        "without": ["bad\nword", ".*"],
        "calls": [json.dumps(schema) for schema in SCHEMAS[:1] + MORE_SCHEMAS[:1]],
    }
    for number, kind in enumerate(KINDS):
        for text in texts.get(kind, ["abcdefgh" * 4]):
            yield bytes([number]) + text.encode(errors="replace") + bytes(range(0, 5 * STEP_BYTES, 5))


def target() -> Callable[[bytes], None]:
    model = load_byte_model()
    constraints = Constraints(model.tokenizer, [0])
    constraints.restore()

    def check(data: bytes) -> None:
        kind = KINDS[data[0] % len(KINDS)] if data else KINDS[0]
        content, steps = data[1:-STEP_BYTES], data[-STEP_BYTES:]
        with suppress(InvalidField, TooCostly):
            grammar = asked(kind, content)
            if grammar is not None:
                constraint = constraints.compile("field", grammar)
                follow(constraint, steps, is_json=isinstance(grammar, JsonSchema))

    return check


def asked(kind: str, content: bytes) -> Grammar | None:
    """None for what the schemas of requests would not let through."""
    text = content.decode(errors="replace")
    if kind in OF_TEXT:
        return OF_TEXT[kind](text)
    if kind == "odd schema":
        chance = Choices(content)
        schema = with_something_odd(chance.choice([*SCHEMAS, *MORE_SCHEMAS]), chance)
    else:
        schema = parsed(text)
    return OF_SCHEMA[kind](schema, len(content)) if isinstance(schema, dict) else None


OF_TEXT: dict[str, Callable[[str], Grammar]] = {
    "regex": Regex,
    "choice": lambda text: OneOf(text.split("\n")),
    "lark": Lark,
    "without": lambda text: Without(text.split("\n")),
}


def plain(schema: dict[str, Any], number: int) -> Grammar:
    return JsonSchema(schema, closes=number % 2 == 0, is_strict=number % 3 == 0)


def calls(schema: dict[str, Any], number: int) -> Grammar:
    functions = {"f": Signature(schema), "g": Signature()}
    return ToolCalls(functions, FORMATS[number % len(FORMATS)], is_optional=number % 3 == 0)


OF_SCHEMA: dict[str, Callable[[dict[str, Any], int], Grammar]] = {"schema": plain, "odd schema": plain, "calls": calls}


def parsed(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def follow(constraint: object, steps: bytes, *, is_json: bool) -> None:
    """Say what is allowed, in a fork and after a restart too, and see that JSON is JSON."""
    assert isinstance(constraint, GrammarConstraint)
    twin, said = constraint.fork(), bytearray()
    for step in steps:
        if constraint.is_over:
            break
        allowed = tokens(constraint.allowed())
        assert allowed == tokens(twin.allowed())
        assert allowed, f"nothing is allowed after {bytes(said)!r}"
        token = allowed[step % len(allowed)]
        if is_json and 0 in allowed:
            json.loads(said)
        constraint.advance(token)
        twin.advance(token)
        if token == 0:
            assert constraint.is_over
            return
        said.append(token - 1)
    if is_json and constraint.is_over:
        json.loads(said)


def tokens(mask: bytes) -> list[int]:
    """The ids whose bits are set: 0 ends the text, others are a byte each."""
    bits = int.from_bytes(mask, "little")
    return [token for token in range(257) if bits >> token & 1]
