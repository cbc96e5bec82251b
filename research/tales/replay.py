"""Replay: pieces of earlier training text, mixed into new data so that the model does not forget the earlier text."""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from random import Random

MAX_CHARACTERS = 3600
"""Maximum length of a piece. It fits into a window of 1,024 tokens."""


def pieces_of(documents: Sequence[str], num_characters: int, seed: int) -> list[str]:
    """Sample pieces of a text, about `num_characters` characters in total."""
    pieces = [piece for document in documents for piece in cut(document)]
    Random(seed).shuffle(pieces)
    ends = accumulate(map(len, pieces))
    return [piece for piece, end in zip(pieces, ends, strict=True) if end <= num_characters]


def cut(document: str) -> Iterator[str]:
    """Cut a document into pieces of whole paragraphs, dropping paragraphs that are too long."""
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
