"""Pieces of a text that stand among tales."""

import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from nvium_core.training.chat.conversations import read_conversations
from nvium_core.training.tales.__main__ import app
from nvium_core.training.tales.beside import MAX_CHARACTERS, cut, pieces_of
from nvium_core.training.tales.pack import SEPARATOR
from tests.training.tales.test_ask import OTTER

paragraphs = st.lists(st.integers(1, MAX_CHARACTERS).map(lambda length: "x" * length), min_size=1)


@given(paragraphs)
def test_a_document_is_cut_between_paragraphs_and_loses_none(paragraphs: list[str]) -> None:
    pieces = list(cut("\n\n".join(paragraphs)))
    assert "\n\n".join(pieces).split("\n\n") == paragraphs
    assert max(map(len, pieces)) <= MAX_CHARACTERS


def test_a_paragraph_longer_than_a_piece_is_left_out() -> None:
    assert list(cut(f"before\n\n{'x' * (MAX_CHARACTERS + 1)}\n\nafter")) == ["before", "after"]


def test_as_many_characters_are_taken_as_are_asked_for_from_anywhere() -> None:
    documents = [str(number).zfill(100) for number in range(1000)]
    taken = pieces_of(documents, 20_000, seed=1)
    assert len(set(taken)) == 200
    assert taken == pieces_of(documents, 20_000, seed=1) != sorted(taken)
    assert len(pieces_of(documents, 10**9, seed=1)) == 1000


def test_the_command_puts_as_much_of_another_text_among_the_tales(tmp_path: Path) -> None:
    tales, books, target = (tmp_path / name for name in ("tales.txt", "books.txt", "asked.jsonl"))
    tales.write_text(SEPARATOR.join([OTTER] * 20))
    books.write_text(SEPARATOR.join(f"A book, chapter {number}. {'It rained. ' * 20}" for number in range(1000)))
    result = CliRunner().invoke(app, ["ask", str(tales), str(target), "--beside", str(books)])
    assert result.exit_code == 0, result.output
    lines = list(read_conversations(target).values())
    is_book = [isinstance(line, str) and line.startswith("A book") for line in lines]
    of_books, of_tales = (
        sum(len(json.dumps(line)) for line, held in zip(lines, is_book, strict=True) if held == wanted)
        for wanted in (True, False)
    )
    assert 0.8 < of_books / of_tales < 1.2
    assert True in is_book[: len(lines) // 4] and False in is_book[: len(lines) // 4]
