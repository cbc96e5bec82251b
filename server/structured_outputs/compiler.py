"""Compiles grammars with llguidance, and finds the schema keyword that prevents compilation.

Runs in separate processes that may crash. Independent of models, sequences and HTTP.
"""

import re
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple, cast

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from server.structured_outputs.bounds import nodes
from server.structured_outputs.grammars import Grammar, JsonSchema
from server.structured_outputs.json_schema import DEFINITIONS, UnusableGrammar, rebuilt, target
from server.structured_outputs.keywords import enforceable

LIMITS = LLParserLimits(
    initial_lexer_fuel=500_000,
    step_lexer_fuel=100_000,
    max_items_in_row=2_500,
    step_max_items=50_000,
    max_lexer_states=50_000,
    max_grammar_size=25_000,
    verbose_errors=False,
)

MAX_REASON_CHARACTERS = 200

SEARCH_SECONDS = 1.0  # maximum CPU time for finding the keywords that prevent compilation

POSITION = re.compile(r"^(\d+)\((\d+)\): ")
PLACE = re.compile(r"^at \d+\(\d+\): ")
LISTING = re.compile(r"\n\s+1 \|.*", re.DOTALL)
UNKNOWN = re.compile(r"Unimplemented keys: \[(.*?)\]")
DETAIL = re.compile(r"^error: (.*)$", re.MULTILINE)
INTERNALS = re.compile(r"Some\(|None\b|' option|registry|\(And|Regex|not supported yet|many digits")
"""Matches errors that name llguidance's internals. Clients get a plain message instead."""


class Compiled(NamedTuple):
    """A compiled grammar with the paths of its unenforced keywords, or an error message."""

    matcher: LLMatcher | None
    ignored: list[str]
    error: str | None = None


class Compiler:
    def __init__(self, tokenizer: LLTokenizer) -> None:
        self._tokenizer = tokenizer
        self._search_ends = 0.0

    def compile(self, grammar: Grammar) -> Compiled:
        ignored = list[str]()
        try:
            grammar.check()
        except UnusableGrammar as refusal:
            return Compiled(None, [], str(refusal))
        for place, schema in grammar.schemas().items():
            schema.schema, unenforced = enforceable(schema.schema, drops=schema.drops)
            ignored += [place + keyword for keyword in unenforced]
        matcher, error = self._attempt(grammar)
        self._search_ends = time.process_time() + SEARCH_SECONDS
        if error:
            for place, schema in grammar.schemas().items():
                if schema.drops:
                    ignored += [place + keyword for keyword in self._drop_failing_keywords(schema)]
            matcher, error = self._attempt(grammar)
        if error or matcher is None:
            return Compiled(None, [], self._message(grammar, error))
        if error := first_error(matcher):
            return Compiled(None, [], "no text satisfies it" if "NoExtension" in error else "it is too complex")
        return Compiled(matcher, ignored)

    def _attempt(self, grammar: Grammar) -> tuple[LLMatcher | None, str]:
        """Compile the grammar. Return the matcher, and the error, which is empty after success."""
        try:
            matcher = LLMatcher(self._tokenizer, grammar.text(), log_level=0, limits=LIMITS)
        except UnusableGrammar as error:
            return None, str(error)
        return matcher, matcher.get_error()

    def _drop_failing_keywords(self, grammar: JsonSchema) -> list[str]:
        """Remove keywords from the schema in place until it compiles, and return their paths."""
        dropped = list[str]()
        while culprit := self._culprit(grammar):
            place, node, key, _ = culprit
            value = node.pop(key)
            if key == "oneOf" and "anyOf" not in node:
                node["anyOf"] = value
            dropped.append(place + key)
        return dropped

    def _message(self, grammar: Grammar, error: str) -> str:
        for place, schema in grammar.schemas().items():
            if culprit := self._culprit(schema):
                within, _, key, error = culprit
                at = (place + within).removesuffix(".")
                return f"{at}: {reason(error, key)}" if at else reason(error, key)
        return reason(error)

    def _culprit(self, grammar: JsonSchema) -> tuple[str, dict[str, Any], str, str] | None:
        """Find the keyword that prevents compilation, in the innermost subschema that fails.

        Return the subschema's path, the subschema, the keyword and the error. Return None if everything compiles or
        the search runs out of time.
        """
        root, seen = cast("dict[str, Any]", grammar.schema), set[int]()

        def error_of(node: Mapping[str, Any]) -> str:
            is_late = time.process_time() > self._search_ends
            return "" if is_late else self._attempt(replace(grammar, schema={**node, **definitions_of(root, node)}))[1]

        place, node, error = "", root, error_of(root)
        while error and id(node) not in seen:
            seen.add(id(node))
            for within, child in parts(root, node, place):
                if id(child) not in seen and (inner := error_of(child)):
                    place, node, error = within, child, inner
                    break
        keys = [key for key in node if key not in DEFINITIONS]
        if not error or not keys or time.process_time() > self._search_ends:
            return None
        unknown = UNKNOWN.search(error)
        named = [key for key in keys if unknown and f'"{key}"' in unknown[1]]
        works = (key for key in keys if not error_of({other: node[other] for other in keys if other != key}))
        return place, node, named[0] if named else next(works, keys[-1]), error


def parts(root: dict[str, Any], node: Mapping[str, Any], place: str) -> list[tuple[str, dict[str, Any]]]:
    """Return the direct subschemas of a node and the target of its `$ref`, with their paths."""
    found = list[tuple[str, Any]]()
    for key, value in node.items():
        if key not in DEFINITIONS:
            rebuilt(key, value, lambda at, part: found.append((place + at, part)))
    reference = node.get("$ref")
    found.append((str(reference).removeprefix("#/").replace("/", "."), target(root, reference)))
    return [(f"{at}.", part) for at, part in found if isinstance(part, dict)]


def definitions_of(root: dict[str, Any], node: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the definitions that a subschema refers to, directly or through other definitions."""
    found: dict[str, dict[str, Any]] = {key: {} for key in DEFINITIONS}
    waiting = [{key: value for key, value in node.items() if key not in DEFINITIONS}]
    while waiting:
        for each in nodes(waiting.pop()):
            _, key, name, *_ = [*str(each.get("$ref")).split("/"), "", ""]
            definition = target(root, f"#/{key}/{name}")
            if key in DEFINITIONS and isinstance(definition, dict) and name not in found[key]:
                found[key][name.replace("~1", "/").replace("~0", "~")] = definition
                waiting.append(definition)
    return {key: named for key, named in found.items() if named}


def first_error(matcher: LLMatcher) -> str:
    """Compute the first two masks. Return the error, or an empty text.

    In an object, the second mask may allow every property. So it may exceed a limit even if the first mask does not.
    """
    probe = matcher.deep_copy()
    mask = int.from_bytes(probe.compute_bitmask(), "little")
    if not probe.is_error():
        probe.consume_token((mask & -mask).bit_length() - 1)
    return probe.get_error()


def reason(error: str, key: str = "") -> str:
    """Rewrite an llguidance error as one plain line. `key` is the schema keyword at fault."""
    text = POSITION.sub(r"line \1, column \2: ", LISTING.sub("", PLACE.sub("", error)))
    detail = DETAIL.search(text)
    if UNKNOWN.search(text):
        return f"not supported: {key}"
    line = detail.group(1) if detail else text.removeprefix("failed to compile JSON schema: ").split("\n")[0]
    if "Invalid type: " in line:
        kind = line.removeprefix("Invalid type: ")[:100]
        return f"type must be null, boolean, integer, number, string, array or object, got {kind!r}"
    if "Unsatisfiable" in line and key != "type":
        return f"{key} allows no value" if key else "no value satisfies it"
    if INTERNALS.search(line):
        return f"{key} cannot be enforced" if key else "it cannot be enforced"
    line = line.removeprefix("Unsatisfiable schema: ")
    return line if len(line) <= MAX_REASON_CHARACTERS else f"{line[:MAX_REASON_CHARACTERS]}…"
