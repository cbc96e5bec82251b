"""Structured answers: compiles grammars into constraints on tokens, with llguidance.

Knows a tokenizer, but no model, sequence or HTTP.
"""

import re
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Any, ClassVar

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.hf import from_tokenizer
from transformers import PreTrainedTokenizerFast

from nvium_core import Constraint, TooCostly
from server.errors import InvalidField
from server.generation.grammars import Grammar, UnusableGrammar

LIMITS = LLParserLimits(
    initial_lexer_fuel=500_000,
    step_lexer_fuel=100_000,
    max_items_in_row=2_500,
    step_max_items=50_000,
    max_lexer_states=50_000,
    max_grammar_size=25_000,
    verbose_errors=False,
)
"""Bounds on compiling and on each token. Most bound time on the device thread, where constraints are evaluated."""

NOT_ALLOWED = "doesn't satisfy the grammar"
"""In llguidance's message for a token that was not allowed. Its only other error is an exceeded limit."""

MAX_REASON_CHARACTERS = 200

MAX_ATTEMPTS = 200
"""Parts of a grammar that are compiled to locate an error."""

PLACE = re.compile(r"^at \d+\(\d+\): ")
LISTING = re.compile(r"\n\s+1 \|.*", re.DOTALL)
UNKNOWN = re.compile(r"Unimplemented keys: \[(.*?)\]")
DETAIL = re.compile(r"^error: (.*)$", re.MULTILINE)


class Constraints:
    """Compiles for one tokenizer and its end-of-text tokens. Takes seconds to make for a large vocabulary."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, end_token_ids: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._added = frozenset(tokenizer.added_tokens_decoder)
        self._tokens: LLTokenizer | None = None
        with suppress(ValueError):  # the tokenizer is neither byte-level nor falls back to bytes
            self._tokens = from_tokenizer(tokenizer, eos_token=sorted(end_token_ids) or None)

    def compile(self, field: str, grammar: Grammar, begun: Sequence[int] = ()) -> Constraint:
        """The constraint for an answer that has `begun`. Takes milliseconds, at worst most of a second: keep it off the
        event loop.

        Raises `InvalidField`, for a grammar that is malformed, unsupported, too large or unsatisfiable.
        A constraint is for one request: its forks share tables, and fail together when those reach their limits.
        """
        matcher = self._matcher(field, grammar)
        if matcher.is_error():
            raise InvalidField(field, self._complaint(field, grammar, matcher.get_error()))
        if error := first_error(matcher):
            raise InvalidField(field, "no text satisfies it" if "NoExtension" in error else "it is too complex")
        matcher.consume_tokens([*begun])
        return GrammarConstraint(matcher, grammar.text(), begun)

    def begun(self, field: str, grammar: Grammar, text: str) -> tuple[int, ...]:
        """The tokens of an answer's beginning, without whitespace that its JSON cannot have; none if the grammar does
        not go on from there. Raises `InvalidField`."""
        for beginning in dict.fromkeys((text, grammar.compacted(text))):
            matcher, token_ids = self._matcher(field, grammar), self._token_ids(beginning)
            if not matcher.is_error() and matcher.consume_tokens(token_ids) and not matcher.is_stopped():
                return tuple(token_ids)
        return ()

    def restore(self) -> None:
        """Let this process unpickle constraints compiled by another process for the same tokenizer."""
        GrammarConstraint.tokens = self._tokens

    def _complaint(self, field: str, grammar: Grammar, error: str) -> str:
        """The error, located in the innermost part that has it."""
        place, budget = "", MAX_ATTEMPTS
        parts = grammar.parts()
        while budget and (part := next(parts, None)):
            budget -= 1
            matcher = self._matcher(field, part[1])
            if matcher.is_error():
                place, error, parts = place + part[0], matcher.get_error(), part[1].parts()
        return f"{place.removeprefix('.')}: {reason(error)}" if place else reason(error)

    def _matcher(self, field: str, grammar: Grammar) -> LLMatcher:
        if self._tokens is None:
            raise InvalidField(field, "not supported: the tokens of this model are not bytes")
        try:
            return LLMatcher(self._tokens, grammar.text(), log_level=0, limits=LIMITS)
        except UnusableGrammar as error:
            raise InvalidField(field, str(error)) from error

    def _token_ids(self, text: str) -> list[int]:
        """Special tokens among them, as templates write them."""
        return list(self._tokenizer(text, add_special_tokens=False).input_ids)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to a text: a special token's name, nothing for an id without a token."""
        if token_id >= len(self._tokenizer):
            return b""
        if self._tokens is None:
            return str(self._tokenizer.decode([token_id])).encode()
        decoded = self._tokens.decode_bytes([token_id])
        is_marked = self._tokens.is_special_token(token_id) and token_id not in self._added
        return b"\xff" + decoded if is_marked else decoded


class GrammarConstraint:
    """A position in a text that follows a grammar. Raises `TooCostly` where the next token would be.

    Pickled as its grammar and the tokens it had `begun` with, so only before any other token.
    """

    tokens: ClassVar[LLTokenizer | None] = None
    """Of this process, for unpickling."""

    def __init__(self, matcher: LLMatcher, grammar: str, begun: Sequence[int] = ()) -> None:
        self._matcher = matcher
        self._grammar = grammar
        self._begun = begun

    def __reduce__(self) -> tuple[Any, ...]:
        return restored, (self._grammar, self._begun)

    @property
    def is_over(self) -> bool:
        return self._matcher.is_stopped()

    def allowed(self) -> bytes:
        mask = self._matcher.compute_bitmask()
        self._check()
        return mask

    def advance(self, token_id: int) -> None:
        self._matcher.consume_token(token_id)
        self._check()

    def fork(self) -> "GrammarConstraint":
        return GrammarConstraint(self._matcher.deep_copy(), self._grammar, self._begun)

    def _check(self) -> None:
        if self._matcher.is_error():  # its message may quote the text
            kind = RuntimeError if NOT_ALLOWED in self._matcher.get_error() else TooCostly
            raise kind(f"the grammar cannot be followed further: {self._matcher.stop_reason()}")


def restored(grammar: str, begun: Sequence[int]) -> GrammarConstraint:
    assert GrammarConstraint.tokens is not None, "no tokenizer was given to restore constraints with"
    matcher = LLMatcher(GrammarConstraint.tokens, grammar, log_level=0, limits=LIMITS)
    matcher.consume_tokens([*begun])
    return GrammarConstraint(matcher, grammar, begun)


class AllowedTokens:
    """Restricts another constraint, if any, to these tokens, given as the bits of a mask."""

    def __init__(self, mask: int, num_bytes: int, also: Constraint | None) -> None:
        self._mask = mask
        self._num_bytes = num_bytes
        self._also = also

    @classmethod
    def of(cls, token_ids: Collection[int], vocab_size: int, also: Constraint | None) -> "AllowedTokens":
        """Raises `InvalidField` for ids outside the vocabulary."""
        if not token_ids or not all(0 <= token_id < vocab_size for token_id in token_ids):
            raise InvalidField("allowed_token_ids", f"must be token ids below {vocab_size}, at least one")
        mask = sum(1 << token_id for token_id in set(token_ids))
        return cls(mask, vocab_size // 8 + 1, also)

    @property
    def is_over(self) -> bool:
        return self._also is not None and self._also.is_over

    def allowed(self) -> bytes:
        mask = self._mask & int.from_bytes(self._also.allowed(), "little") if self._also else self._mask
        return mask.to_bytes(self._num_bytes, "little")

    def advance(self, token_id: int) -> None:
        if self._also:
            self._also.advance(token_id)

    def fork(self) -> "AllowedTokens":
        return AllowedTokens(self._mask, self._num_bytes, self._also.fork() if self._also else None)


def first_error(matcher: LLMatcher) -> str:
    """The error at the first token or the one after it, where an object may choose among all its properties."""
    probe = matcher.deep_copy()
    mask = int.from_bytes(probe.compute_bitmask(), "little")
    if not probe.is_error():
        probe.consume_token((mask & -mask).bit_length() - 1)
    return probe.get_error()


def reason(error: str) -> str:
    """llguidance's error in one line."""
    text = LISTING.sub("", PLACE.sub("", error))
    detail = DETAIL.search(text)
    if unknown := UNKNOWN.search(text):
        return f"not supported: {unknown[1].replace(chr(34), '')}"
    line = detail.group(1) if detail else text.removeprefix("failed to compile JSON schema: ").split("\n")[0]
    return line if len(line) <= MAX_REASON_CHARACTERS else f"{line[:MAX_REASON_CHARACTERS]}…"
