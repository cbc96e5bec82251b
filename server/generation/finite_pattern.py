"""The texts that a regular expression matches, where they are few: `^[ab]_(x|y)?$` matches six.

Knows literals, classes, groups, alternatives and counts. Anything else, and what matches too many, has none here.
"""

import re
from collections.abc import Iterator
from itertools import product

MAX_TEXTS = 100
MAX_CHARACTERS = 200
"""Of a text, and of a pattern."""

TOKEN = re.compile(r"\[([\w -]+)\]|(\()(?:\?:)?|([)|])|(\?)|\{(\d)(?:,(\d))?\}|\\([-.$^*+?()\[\]{}|/\\])|([\w /:@-])")
CLASS_PART = re.compile(r"(\w)-(\w)|([\w -])")


class NotFew(ValueError):
    """It matches too many texts, or has what is not known here."""


def texts_of(pattern: str) -> list[str]:
    """All texts that an anchored pattern matches; none if they are too many or it is not understood."""
    if not (pattern.startswith("^") and pattern.endswith("$")) or len(pattern) > MAX_CHARACTERS:
        return []
    try:
        return list(dict.fromkeys(FewTexts(pattern[1:-1]).read()))
    except (NotFew, RecursionError):
        return []


class FewTexts:
    def __init__(self, pattern: str) -> None:
        self._tokens = list(tokens(pattern))
        self._place = 0

    def read(self) -> list[str]:
        found = self._alternatives()
        if self._place < len(self._tokens):
            raise NotFew
        return found

    def _next(self) -> re.Match[str] | None:
        return self._tokens[self._place] if self._place < len(self._tokens) else None

    def _alternatives(self) -> list[str]:
        found = self._sequence()
        while (token := self._next()) and token[3] == "|":
            self._place += 1
            found = bounded(found + self._sequence())
        return found

    def _sequence(self) -> list[str]:
        found = [""]
        while (token := self._next()) and not token[3]:
            found = joined(found, self._counted())
        return found

    def _counted(self) -> list[str]:
        one = self._atom()
        if not (token := self._next()) or not (token[4] or token[5]):
            return one
        self._place += 1
        least, most = (0, 1) if token[4] else (int(token[5]), int(token[6] or token[5]))
        found, repeated = list[str](), [""]
        for number in range(most + 1):
            repeated = joined(repeated, one) if number else repeated
            found += repeated if number >= least else []
        return bounded(found)

    def _atom(self) -> list[str]:
        token = self._next()
        assert token is not None
        self._place += 1
        if token[1]:
            return characters(token[1])
        if token[2]:
            found, end = self._alternatives(), self._next()
            if end is None or end[3] != ")":
                raise NotFew
            self._place += 1
            return found
        if token[4] or token[5]:
            raise NotFew
        return [token[7] or token[8]]


def tokens(pattern: str) -> Iterator[re.Match[str]]:
    place = 0
    while place < len(pattern):
        token = TOKEN.match(pattern, place)
        if token is None:
            raise NotFew
        yield token
        place = token.end()


def characters(content: str) -> list[str]:
    """Those of a class."""
    found = list[str]()
    for first, last, single in CLASS_PART.findall(content):
        found += [single] if single else bounded([chr(code) for code in range(ord(first), ord(last) + 1)])
    return found


def joined(heads: list[str], tails: list[str]) -> list[str]:
    length = max(map(len, heads), default=0) + max(map(len, tails), default=0)
    if len(heads) * len(tails) > MAX_TEXTS or length > MAX_CHARACTERS:
        raise NotFew
    return ["".join(pair) for pair in product(heads, tails)]


def bounded(texts: list[str]) -> list[str]:
    if len(texts) > MAX_TEXTS:
        raise NotFew
    return texts
