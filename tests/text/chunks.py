"""Splits texts into chunks, to test streaming."""

from itertools import pairwise
from typing import TypeVar

Text = TypeVar("Text", str, bytes)


def chunks(text: Text, cuts: list[int]) -> list[Text]:
    """Split the text at those of the positions that are inside it."""
    places = sorted({0, len(text), *(place for place in cuts if place < len(text))})
    return [text[start:end] for start, end in pairwise(places)]
