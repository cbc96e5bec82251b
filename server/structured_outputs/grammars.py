"""Grammars for structured outputs, in llguidance's variant of Lark.

Generated JSON has no whitespace outside strings: otherwise a small model could emit spaces forever. Properties have the
schema's order. Independent of tokenizers, engines and HTTP.
"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from llguidance import regex_to_lark
from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark

from nvium_core.text.answer_parsers import JSON_LINES, CallFormat
from server.structured_outputs.bounds import MAX_CHARACTERS, check_bounds, check_text, nodes, require
from server.structured_outputs.json_schema import Preparation, Schema, UnusableGrammar

HEADER = '%llguidance {"no_forcing": true}\nstart: '
"""Start of a grammar. `no_forcing` skips the search for forced tokens, which takes time linear in the text."""

BLANK = r"[ \n]*"  # whitespace that may precede the first call of an answer

KEY = '"name"'

LARK = re.compile(r"^[ \t]*(%llguidance\b|start[ \t]*:)", re.MULTILINE)
"""Matches grammars in Lark. Other grammars are taken for GBNF."""


class Grammar(ABC):
    """The required format of an answer."""

    @abstractmethod
    def text(self) -> str:
        """Return the grammar in llguidance's variant of Lark. Raise `UnusableGrammar` if it is invalid."""

    def schemas(self) -> "Mapping[str, JsonSchema]":
        """Return the JSON schemas of the grammar. The keys are prefixes of their keywords' paths."""
        return {}

    def check(self) -> None:
        """Raise `UnusableGrammar` if a JSON schema is nested too deeply, or all of them together are too long."""
        size = 0
        for schema in self.schemas().values():
            for _ in nodes(schema.schema):  # raises if the schema is too deep for `json.dumps`
                pass
            size += len(json.dumps(schema.schema))
        require(size <= MAX_CHARACTERS, f"schemas must have at most {MAX_CHARACTERS} characters in total, got {size}")


@dataclass
class JsonSchema(Grammar):
    """JSON that a schema describes. `json_schema.py` and `bounds.py` list the differences from the standard."""

    schema: Schema
    is_strict: bool = False
    """Also close objects that declare no `properties`: they must be empty."""
    drops: bool = False
    """Drop keywords that cannot be enforced. If False, reject a schema with such keywords."""

    def text(self) -> str:
        return HEADER + self.rule()

    def rule(self) -> str:
        """Return the schema as a Lark expression."""
        ready = Preparation(self.schema, is_strict=self.is_strict).root()
        check_bounds(ready)
        try:
            text = json.dumps({**ready, "x-guidance": {"whitespace_flexible": False}}, allow_nan=False)
        except ValueError as error:
            raise UnusableGrammar("must not contain NaN or infinity") from error
        check_text(text)
        return f"%json {text}"

    def schemas(self) -> "Mapping[str, JsonSchema]":
        return {"": self}


ANY_OBJECT = JsonSchema({"type": "object"})


@dataclass(frozen=True)
class Regex(Grammar):
    """Text that fully matches a pattern in the syntax of Rust's regex crate, without look-arounds."""

    pattern: str

    def text(self) -> str:
        require(self.pattern != "", "must not be empty")
        check_text(self.pattern)
        num_backslashes = len(self.pattern) - len(self.pattern.rstrip("\\"))
        require(num_backslashes % 2 == 0, "must not end with an incomplete escape")
        return f"{HEADER}/{regex_to_lark(self.pattern, '')}/"


@dataclass(frozen=True)
class OneOf(Grammar):
    options: Sequence[str]

    def text(self) -> str:
        require(len(self.options) > 0, "must be a non-empty list of strings")
        require(all(self.options), "must not contain an empty string")
        check_text("".join(self.options))
        return f"{HEADER}CHOICE\nCHOICE: {' | '.join(map(json.dumps, self.options))}"


@dataclass(frozen=True)
class Lark(Grammar):
    """A grammar that the client wrote, in llguidance's variant of Lark or in llama.cpp's GBNF."""

    grammar: str

    def text(self) -> str:
        require(self.grammar.strip() != "", "must not be empty")
        check_text(self.grammar)
        try:
            return self.grammar if LARK.search(self.grammar) else str(gbnf_to_lark(self.grammar))
        except Exception as error:  # the converter's exceptions are not documented
            reason, _, _ = str(error).partition("\n")
            is_plain = type(error) in (Exception, GbnfToLarkError)  # the texts of other exceptions name internals
            cause = f": {reason[:200]}" if is_plain else ""
            raise UnusableGrammar(f"must be a valid Lark or GBNF grammar{cause}") from error


def arguments(parameters: Schema | None = None, *, is_strict: bool = False) -> JsonSchema:
    """Return the schema of a function's arguments. If `parameters` is missing or empty, allow any object."""
    parameters = parameters or {}
    schema = parameters if "type" in parameters else {"type": "object", **parameters}
    return JsonSchema(schema, is_strict=is_strict, drops=not is_strict)


@dataclass(frozen=True)
class ToolCalls(Grammar):
    """Calls of these functions, in the format of the model's chat template."""

    functions: Mapping[str, JsonSchema]
    """The schemas of the arguments, by function name."""
    call_format: CallFormat = JSON_LINES
    marker: int | None = None
    """Id of the special token that may precede the calls."""
    is_optional: bool = False
    """Allow an answer without calls: JSON that matches `otherwise`, or any text if `otherwise` is None.

    An answer that starts like a call must be a call.
    """
    is_parallel: bool = False
    otherwise: JsonSchema | None = None

    def text(self) -> str:
        require(len(self.functions) > 0, "must be a non-empty list of functions")
        lines = [*self._start(), f"first: {self._calls(is_first=True)}"]
        lines += [f"call: {self._calls(is_first=False)}"] if self.is_parallel else []
        lines += [f"arguments{i}: {self._arguments(*each)}" for i, each in enumerate(self.functions.items())]
        check_text("".join(lines))
        return HEADER.removesuffix("start: ") + "\n".join(lines)

    def check(self) -> None:
        super().check()
        for name, schema in self.functions.items():
            kind = str(schema.schema.get("type", "object"))[:100]
            require(kind == "object", f"the parameters of {name} must have type object, got {kind}")

    def schemas(self) -> Mapping[str, JsonSchema]:
        otherwise = {"response_format.": self.otherwise} if self.otherwise else {}
        return {f"{name}.parameters.": schema for name, schema in self.functions.items()} | otherwise

    def _start(self) -> Iterator[str]:
        """Yield the start rule, and the rules for the text and for the opening of a call, each a lexeme."""
        fmt = self.call_format
        more = f"({quoted(fmt.between + fmt.trigger)} call)*" if self.is_parallel else ""
        calls = f"first {more} {quoted(fmt.after)}"
        if self.marker is not None:
            calls = f"<[{self.marker}]>? {calls}"
        if self.otherwise:
            yield f"start: {self.otherwise.rule()} | {calls}"
        else:
            yield f"start: TEXT? | {calls}" if self.is_optional else f"start: {calls}"
        has_text = self.is_optional and not self.otherwise
        if fmt.trigger:
            yield f"begun[lazy]: {'/(?s:.*)/' if has_text else ''} {quoted(fmt.trigger)}"
        if has_text and fmt.trigger:
            yield "TEXT: /(?s:.+)/"
        elif has_text:
            yield f"TEXT: /(?s:.+)/ & ~/{BLANK}{pattern(fmt.before + fmt.beginning)}(?s:.*)/"

    def _calls(self, *, is_first: bool) -> str:
        calls = [f"{self._opening(name, is_first)} arguments{i}" for i, name in enumerate(self.functions)]
        return " | ".join(f"{call} {quoted(self.call_format.end)}" for call in calls)

    def _arguments(self, name: str, schema: JsonSchema) -> str:
        is_name = re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", name) is not None
        require(is_name, f"a function's name must have 1 to 64 letters, digits, _ or -, got {name[:100]!r}")
        return replace(schema, schema={"type": "object", **schema.schema}).rule()

    def _opening(self, name: str, is_first: bool) -> str:
        fmt = self.call_format
        if fmt.trigger:
            named = quoted(fmt.beginning.removeprefix(fmt.trigger) + name)
            return f"{'begun' if is_first else ''} {named} {quoted(fmt.middle)}"
        opening = fmt.beginning + name + fmt.middle
        if is_first and self.otherwise and not fmt.before:
            return f'"{{" {quoted(KEY)} {quoted(opening.removeprefix("{" + KEY))}'  # split as the JSON lexer does
        if is_first:
            return f"/{BLANK if self.is_optional else ''}{pattern(fmt.before + opening)}/"
        return quoted(opening)


def quoted(text: str) -> str:
    return json.dumps(text) if text else ""


def pattern(text: str) -> str:
    return re.sub(r"([^\w\s])", r"\\\1", text)
