"""Isolated processes that compile clients' grammars with llguidance and compute their token masks.

On hostile input llguidance can crash, exhaust memory, or spend minutes on one mask that cannot be interrupted. So each
grammar runs in its own process. Processes are forked in three levels:

    fork server             has loaded the tokenizer
    └── grammar process     has compiled one grammar; later requests reuse it
        └── mask process    computes the masks of one running request's choices

Independent of PyTorch and HTTP.
"""

import gc
import os
import pickle
import re
import resource
import struct
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, cast

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from nvium_core.text.sandbox import limit_cpu_time, limit_memory, serve_forks
from server.structured_outputs.bounds import enforceable, nodes
from server.structured_outputs.grammars import Grammar, JsonSchema
from server.structured_outputs.json_schema import DEFINITIONS, UnusableGrammar, rebuilt, target

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

COMPILE_SECONDS = 2.5
"""Maximum CPU time for compiling one grammar. All times in this module are CPU time."""

MASK_BUDGET_SECONDS = 0.5
"""Budget of CPU time for the masks of one request: the initial budget, which is also the maximum."""

BUDGET_PER_TOKEN_SECONDS = 0.005  # CPU time added to the budget with each token

MEMORY_BYTES = 512 << 20  # address space that a process may use in addition to the fork server's

STACK_BYTES = 64 << 20
"""Maximum size of the stack. It is large, because llguidance recurses along chains of references."""

COMMAND = struct.Struct("iiii")
"""A choice, its next token, another choice, and the core on which to compute the mask, or `ANY_CORE`.

If the token is `BEGIN`, copy the state of the other choice.
"""

BEGIN = -1

ANY_CORE = -1

REPLY = struct.Struct("iB")  # a choice and its state; the choice's mask follows

CORES = os.sched_getaffinity(0) if sys.platform == "linux" else set[int]()

GOES_ON, OVER, TOO_COSTLY, BROKEN = range(4)

NOT_ALLOWED = "doesn't satisfy the grammar"
"""Part of llguidance's error message for a disallowed token. All other errors mean an exceeded limit."""


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
            schema.schema = enforceable(schema.schema, place, ignored, drops=schema.drops)
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


def main(pipe: Connection) -> None:
    """Run the fork server. The first message is the tokenizer."""
    compiler = Compiler(LLTokenizer(*pickle.loads(pipe.recv_bytes())))  # noqa: S301 # from the server
    os.nice(5)  # the engine has priority
    _, hard = resource.getrlimit(resource.RLIMIT_STACK)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_STACK, (STACK_BYTES, hard))
    limit_memory(MEMORY_BYTES)
    gc.freeze()
    serve_forks(pipe, lambda forked: serve_grammar(forked, compiler))


def serve_grammar(pipe: Connection, compiler: Compiler) -> None:
    """Compile a grammar and send the result. Then fork a mask process for each request."""
    grammar = pickle.loads(pipe.recv_bytes())  # noqa: S301 # from the server
    limit_cpu_time(COMPILE_SECONDS)
    compiled = compiler.compile(grammar)
    limit_cpu_time(0)
    pipe.send_bytes(pickle.dumps(compiled._replace(matcher=None)))
    if matcher := compiled.matcher:
        serve_forks(pipe, lambda forked: MaskServer(forked, matcher).run())


class MaskServer:
    def __init__(self, pipe: Connection, matcher: LLMatcher) -> None:
        self._pipe = pipe
        self._states = {0: matcher}
        self._seconds = MASK_BUDGET_SECONDS
        self._core = ANY_CORE

    def run(self) -> None:
        while True:
            *command, core = COMMAND.unpack(self._pipe.recv_bytes())
            self._move_to(core)
            limit_cpu_time(self._seconds)
            started = time.process_time()
            state, mask = self._follow(*command)
            limit_cpu_time(0)
            unused = max(0.0, self._seconds - (time.process_time() - started))
            self._seconds = min(MASK_BUDGET_SECONDS, unused + BUDGET_PER_TOKEN_SECONDS)
            self._pipe.send_bytes(REPLY.pack(command[0], state) + mask)

    def _move_to(self, core: int) -> None:
        if core != self._core:
            self._core = core
            with suppress(OSError):  # the core may be forbidden by now
                os.sched_setaffinity(0, CORES if core == ANY_CORE else {core})

    def _follow(self, choice: int, token_id: int, origin: int) -> tuple[int, bytes]:
        if token_id == BEGIN and choice != origin:
            self._states[choice] = self._states[origin].deep_copy()
        matcher = self._states[choice]
        if token_id != BEGIN:
            matcher.consume_token(token_id)
        mask = b"" if matcher.is_stopped() else matcher.compute_bitmask()
        if matcher.is_error():
            return BROKEN if NOT_ALLOWED in matcher.get_error() else TOO_COSTLY, b""
        return OVER if matcher.is_stopped() else GOES_ON, mask
