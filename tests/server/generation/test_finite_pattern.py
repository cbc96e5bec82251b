"""Few texts of a pattern, against what `re` says of every short text."""

import re
from itertools import product

import pytest

from server.generation.finite_pattern import MAX_TEXTS, texts_of


@pytest.mark.parametrize(
    "pattern",
    ["^ab$", "^[ab]$", "^[a-b]c?$", "^(a|bc)$", "^(?:a|b){2}$", "^a{0,2}b$", "^((a|b)c|)$", "^[ab][bc]{1,2}$", "^$"],
)
def test_the_texts_are_those_that_match(pattern: str) -> None:
    every = ["".join(letters) for size in range(4) for letters in product("abc", repeat=size)]
    assert sorted(texts_of(pattern)) == sorted(text for text in every if re.fullmatch(pattern, text))


@pytest.mark.parametrize(
    "pattern", ["a", "^a", "^a+$", "^.$", r"^\d$", "^[^a]$", "^[a-z]{2}$", "^(a$", "^a)$", "^?$", "^a|b$x", "^(?=a)a$"]
)
def test_others_have_none(pattern: str) -> None:
    assert texts_of(pattern) == []


def test_there_are_never_too_many() -> None:
    assert len(texts_of("^[a-j]{2}$")) == MAX_TEXTS
    assert texts_of("^[a-k]{2}$") == []
    assert texts_of("^" + "(" * 150 + "$") == []
    assert texts_of("^(((a{9}){9}){9}){9}b?$") == []
