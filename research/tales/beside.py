"""Pieces of a text that a model has read before, to stand among what it learns next, so that it forgets less of it."""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from random import Random

MAX_CHARACTERS = 3600
"""Of a piece; less than a window of 1,024 tokens."""


def pieces_of(documents: Sequence[str], num_characters: int, seed: int) -> list[str]:
    """Pieces from anywhere in the text, in no order, of about so many characters together or of all there are."""
    pieces = [piece for document in documents for piece in cut(document)]
    Random(seed).shuffle(pieces)
    ends = accumulate(map(len, pieces))
    return [piece for piece, end in zip(pieces, ends, strict=True) if end <= num_characters]


def cut(document: str) -> Iterator[str]:
    """A document in pieces of whole paragraphs. A paragraph that is too long is left out."""
    piece = ""
    for paragraph in document.split("\n\n"):
        if len(piece) + len(paragraph) + 2 > MAX_CHARACTERS:
            if piece:
                yield piece
            piece = ""
        if len(paragraph) <= MAX_CHARACTERS:
            piece = f"{piece}\n\n{paragraph}" if piece else paragraph
    if piece:
        yield piece
