"""The forms that an answer may be asked to have, as grammars in llguidance's language.

JSON has no whitespace between its parts, so that a small model cannot write blanks forever; properties come in the
schema's order. A grammar costs time when it is compiled and again at every token, so its size is bounded: compiling
takes a fraction of a second at most, a token a few milliseconds. Knows no tokens, engines or HTTP.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import Any, Protocol

from llguidance import regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

from nvium_core.text.tool_calls import PLAIN, CallFormat
from server.generation.json_schema import DEFINITIONS, LISTS, NAMED, SINGLE, SchemaTooLarge, prepared

Schema = Mapping[str, Any]

MAX_CHARACTERS = 100_000
MAX_DEPTH = 100
MAX_ALTERNATIVES = 32
"""Of one `anyOf` or `oneOf`, not counting constants: in a recursive schema each token costs their square."""

MAX_OPTIONAL_PROPERTIES = 500
"""Of one object: any of them may come next."""

MAX_PATTERNS = 16
"""Different ones in a schema. Merged schemas intersect them, at a cost of two to the power of their number."""

MAX_MULTIPLE = 10_000
"""Of the least common multiple of all `multipleOf`, without decimal places: the number of states of a number."""

FUNCTION_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")

SURROGATES = re.compile("[\ud800-\udfff]")

HEADER = '%llguidance {"no_forcing": true}\nstart: '
"""Without forcing, the model chooses the tokens of fixed text too; searching for them costs as much as it is long."""

BLANK = r"[ \n]*"
"""Allowed before a call at the beginning of an answer."""

BETWEEN_PARTS = re.compile(r'("(?:[^"\\]|\\.)*(?:"|$))|\s+', re.DOTALL)
"""Strings, which stay, or whitespace, which goes."""

KEY = '"name"'

COMPACT = {"whitespace_flexible": False}


class UnusableGrammar(ValueError):
    """The message says why the grammar cannot be used."""


class Grammar(Protocol):
    """A form that an answer can be asked to have."""

    def text(self) -> str:
        """In llguidance's variant of Lark. Raises `UnusableGrammar`."""
        ...

    def parts(self) -> "Iterator[tuple[str, Grammar]]":
        """Its smaller grammars, by their place in it, to locate an error."""
        ...

    def compacted(self, text: str) -> str:
        """The beginning of an answer, its JSON without the whitespace that the grammar does not allow."""
        ...


class SinglePart:
    """A grammar of one part, which is not JSON."""

    def parts(self) -> Iterator[tuple[str, Grammar]]:
        return iter(())

    def compacted(self, text: str) -> str:
        return text


@dataclass(frozen=True)
class JsonSchema:
    """JSON of a schema; `json_schema.py` says where it is read differently from the standard."""

    schema: Schema
    closes: bool = True
    is_strict: bool = False

    def text(self) -> str:
        return HEADER + json_rule(self.schema, closes=self.closes, is_strict=self.is_strict)

    def parts(self) -> Iterator[tuple[str, Grammar]]:
        definitions = {key: self.schema[key] for key in DEFINITIONS if key in self.schema}
        for place, child in subschemas(self.schema):
            yield place, replace(self, schema={**definitions, **child})

    def compacted(self, text: str) -> str:
        return compact(text)


ANY_OBJECT = JsonSchema({"type": "object"})


@dataclass(frozen=True)
class Regex(SinglePart):
    """Text that a pattern matches completely, in the syntax of Rust's regex crate, without look-arounds."""

    pattern: str

    def text(self) -> str:
        check(self.pattern != "", "must not be empty")
        check_text(self.pattern)
        num_backslashes = len(self.pattern) - len(self.pattern.rstrip("\\"))
        check(num_backslashes % 2 == 0, "ends within an escape")
        return f"{HEADER}/{regex_to_lark(self.pattern, '')}/"


@dataclass(frozen=True)
class OneOf(SinglePart):
    """One of several texts."""

    options: Sequence[str]

    def text(self) -> str:
        check(len(self.options) > 0, "must hold at least one text")
        check(all(self.options), "none of the texts may be empty")
        check_text("".join(self.options))
        return f"{HEADER}CHOICE\nCHOICE: {' | '.join(map(json.dumps, self.options))}"


@dataclass(frozen=True)
class Lark(SinglePart):
    """The client's own grammar, in llguidance's variant of Lark or in llama.cpp's GBNF."""

    grammar: str

    def text(self) -> str:
        check(self.grammar.strip() != "", "must not be empty")
        check_text(self.grammar)
        try:
            return str(any_to_lark(self.grammar))
        except Exception as error:  # the converter raises anything
            raise UnusableGrammar("is neither Lark nor GBNF") from error


@dataclass(frozen=True)
class Without(SinglePart):
    """Any text that contains none of these."""

    words: Sequence[str]

    def text(self) -> str:
        check(all(self.words), "none of the texts may be empty")
        check_text("".join(self.words))
        return f"{HEADER}TEXT?\nTEXT: /(?s:.+)/ & ~/(?s:.*)({'|'.join(map(pattern, self.words))})(?s:.*)/"


@dataclass(frozen=True)
class Signature:
    """The arguments of a function that may be called (None: any object)."""

    parameters: Schema | None = None
    is_strict: bool = False
    closes: bool = True

    @property
    def schema(self) -> JsonSchema:
        schema = {"type": "object", **(self.parameters or {})}
        return JsonSchema(schema, closes=self.closes, is_strict=self.is_strict)


@dataclass(frozen=True)
class ToolCalls:
    """Calls of these functions, by name, in the format of the model's template.

    `is_optional`: text, or JSON of the schema `otherwise`, is an answer too, but what begins as a call must become one.
    `special` are the ids of the format's texts that are special tokens.
    """

    functions: Mapping[str, Signature]
    form: CallFormat = PLAIN
    special: Mapping[str, int] = field(default_factory=dict)
    is_optional: bool = False
    is_parallel: bool = False
    otherwise: JsonSchema | None = None

    def text(self) -> str:
        check(len(self.functions) > 0, "must hold at least one function")
        lines = [*self._start(), f"first: {self._calls(is_first=True)}"]
        lines += [f"call: {self._calls(is_first=False)}"] if self.is_parallel else []
        check_text("".join(lines))
        return HEADER.removesuffix("start: ") + "\n".join(lines)

    def parts(self) -> Iterator[tuple[str, Grammar]]:
        for name, function in self.functions.items():
            yield f"{name}.parameters", function.schema

    def compacted(self, text: str) -> str:
        head, found, arguments = text.partition(self.form.middle)
        return head + found + compact(arguments)

    def _start(self) -> Iterator[str]:
        """Text and the opening of a call are one lexeme each, so that the lexer can tell them apart."""
        form = self.form
        more = f"({self._literal(form.between + form.trigger)} call)*" if self.is_parallel else ""
        calls = f"first {more} {self._literal(form.after)}"
        if form.marker in self.special:
            calls = f"{self._literal(form.marker)}? {calls}"
        if other := self.otherwise:
            yield f"start: {json_rule(other.schema, closes=other.closes, is_strict=other.is_strict)} | {calls}"
        else:
            yield f"start: TEXT? | {calls}" if self.is_optional else f"start: {calls}"
        yield from self._text(has_text=self.is_optional and not self.otherwise)

    def _text(self, *, has_text: bool) -> Iterator[str]:
        """What a call begins with after text, and the text."""
        form = self.form
        if form.trigger in self.special:
            yield f"begun: {'TEXT?' if has_text else ''} {self._literal(form.trigger)}"
        elif form.trigger:
            yield f"begun[lazy]: {'/(?s:.*)/' if has_text else ''} {quoted(form.trigger)}"
        if has_text and form.trigger:
            yield "TEXT: /(?s:.+)/"
        elif has_text:
            yield f"TEXT: /(?s:.+)/ & ~/{BLANK}{pattern(form.before + form.beginning)}(?s:.*)/"

    def _calls(self, *, is_first: bool) -> str:
        return " | ".join(self._call(name, function, is_first) for name, function in self.functions.items())

    def _call(self, name: str, function: Signature, is_first: bool) -> str:
        is_name = FUNCTION_NAME.fullmatch(name) is not None
        check(is_name, f"a function's name must be 1 to 64 letters, digits, _ or -, got {name[:100]!r}")
        schema = function.schema
        kind = str(schema.schema["type"])[:100]
        check(kind == "object", f"the parameters of {name} must be an object, got type {kind}")
        rule = json_rule(schema.schema, closes=schema.closes, is_strict=schema.is_strict)
        return f"{self._opening(name, is_first)} {rule} {self._literal(self.form.end)}"

    def _opening(self, name: str, is_first: bool) -> str:
        form = self.form
        if form.trigger:
            own_id = f"{self._literal(form.id_mark)} /[a-zA-Z0-9]{{{form.id_length}}}/" if form.id_mark else ""
            named = self._literal(form.beginning.removeprefix(form.trigger) + name)
            return f"{'begun' if is_first else ''} {named} {own_id} {self._literal(form.middle)}"
        opening = form.beginning + name + form.middle
        if is_first and self.otherwise and not form.before:
            return f'"{{" {quoted(KEY)} {quoted(opening.removeprefix("{" + KEY))}'  # as JSON is lexed
        if is_first:
            return f"/{BLANK if self.is_optional else ''}{pattern(form.before + opening)}/"
        return quoted(opening)

    def _literal(self, text: str) -> str:
        """The text, with its special tokens as such."""
        parts = re.split(f"({'|'.join(map(re.escape, self.special))})", text) if self.special else [text]
        return " ".join(f"<[{self.special[part]}]>" if part in self.special else quoted(part) for part in parts if part)


def compact(text: str) -> str:
    """JSON, or the beginning of some, without whitespace between its parts."""
    return BETWEEN_PARTS.sub(r"\1", text)


def quoted(text: str) -> str:
    """A literal of Lark; empty for an empty text."""
    return json.dumps(text) if text else ""


def pattern(text: str) -> str:
    """A regular expression of Lark that matches the text."""
    return re.sub(r"([^\w\s])", r"\\\1", text)


def json_rule(schema: Schema, *, closes: bool, is_strict: bool) -> str:
    check_depth(schema)
    try:
        ready = prepared(schema, closes=closes, is_strict=is_strict)
        check_bounds(ready)
        text = json.dumps({**ready, "x-guidance": COMPACT}, allow_nan=False)
    except SchemaTooLarge as error:
        raise UnusableGrammar(str(error)) from error
    except ValueError as error:
        if isinstance(error, UnusableGrammar):
            raise
        raise UnusableGrammar("JSON has no NaN and no infinity") from error
    check_text(text)
    return f"%json {text}"


def subschemas(schema: Schema) -> Iterator[tuple[str, Schema]]:
    """The schemas inside a schema, by their place."""
    for key, value in schema.items():
        if key in DEFINITIONS:
            continue
        named = value if isinstance(value, Mapping) else dict(enumerate(value)) if isinstance(value, list) else {}
        if key in SINGLE and isinstance(value, Mapping):
            yield f".{key}", value
        elif key in (*NAMED, *LISTS):
            yield from ((f".{key}.{name}", child) for name, child in named.items() if isinstance(child, Mapping))


def check_depth(schema: Schema) -> None:
    for _ in nodes(schema):
        pass


def check_bounds(schema: Schema) -> None:
    """Refuse a schema that would take long to compile or to follow."""
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
