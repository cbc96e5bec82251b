"""The data mixture (`Diet`): how often each document of a text is read."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from nvium_core.errors import NviumError

END_OF_TEXT = "<|endoftext|>"
COMMON_WORDS = 1000
WORD = re.compile(r"[a-z']+")


class DataError(NviumError, ValueError):
    """Training text or conversations are unusable."""


def simplicity(documents: Sequence[str]) -> NDArray[np.float64]:
    """Return, for each document, the share of its words that are among the 1,000 most common words in the text."""
    words = [WORD.findall(document.lower()) for document in documents]
    common = {word for word, _ in Counter(chain.from_iterable(words)).most_common(COMMON_WORDS)}
    return np.array([sum(word in common for word in each) / max(1, len(each)) for each in words])


@dataclass(frozen=True, kw_only=True)
class Diet:
    """A data mixture: simple documents are read `simple_epochs` times, and other documents `other_epochs` times.

    Documents of at most `short_characters` are simple. The documents with the highest `simplicity` are also simple, up
    to `simple_share` of all characters. In `untitled_share` of the readings, the title is dropped, so that the model
    learns to begin without a title. A title is a first line followed by a blank line.
    """

    simple_share: float = 0.0
    short_characters: int = 0
    simple_epochs: float = 1.0
    other_epochs: float = 1.0
    untitled_share: float = 0.0

    def __post_init__(self) -> None:
        if min(self.simple_epochs, self.other_epochs) < 0 or max(self.simple_epochs, self.other_epochs) == 0:
            raise ValueError("simple_epochs and other_epochs must not be negative, and one of them must be positive")

    def readings(self, documents: Sequence[str], seed: int) -> list[str]:
        """Repeat each document as often as the mixture requires, and shuffle the result."""
        rng = np.random.default_rng(seed)
        order = self.order(documents, rng)
        untitled = rng.random(len(order)) < self.untitled_share
        return [without_title(documents[i]) if bare else documents[i] for i, bare in zip(order, untitled, strict=True)]

    def order(self, documents: Sequence[str], rng: np.random.Generator) -> NDArray[np.int64]:
        epochs = self.simple_epochs if self.simple_epochs == self.other_epochs else self._epochs(documents)
        times = np.floor(epochs + rng.random(len(documents))).astype(int)
        return rng.permutation(np.repeat(np.arange(len(documents)), times))

    def _epochs(self, documents: Sequence[str]) -> NDArray[np.float64]:
        simplest_first = np.argsort(-simplicity(documents), kind="stable")
        lengths = np.array([len(document) for document in documents])[simplest_first]
        is_simple = np.empty(len(documents), dtype=bool)
        is_simple[simplest_first] = lengths.cumsum() <= self.simple_share * lengths.sum()
        is_simple[simplest_first] |= lengths <= self.short_characters
        return np.where(is_simple, self.simple_epochs, self.other_epochs)


def without_title(document: str) -> str:
    """Drop the first line if a blank line follows and the first line does not end a sentence."""
    title, blank, text = document.partition("\n\n")
    is_title = blank and "\n" not in title and not title.endswith((".", '."', '!"', '?"'))
    return text if is_title else document
