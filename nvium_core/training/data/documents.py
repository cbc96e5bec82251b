"""Documents of a text file, and the diet: which are read, and how often.

Text is UTF-8, plain or .xz, documents separated by a line `<|endoftext|>`.
"""

import lzma
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nvium_core.errors import NviumError

END_OF_TEXT = "<|endoftext|>"
COMMON_WORDS = 1000
WORD = re.compile(r"[a-z']+")


class DataError(NviumError, ValueError):
    """Text that cannot be used; the message names the file."""


def read_documents(path: Path) -> list[str]:
    try:
        with (lzma.open if path.suffix == ".xz" else open)(path, "rt", encoding="utf-8-sig") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError, lzma.LZMAError, EOFError) as error:
        raise DataError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    documents = [
        document.strip("\n") for document in re.split(rf"^{re.escape(END_OF_TEXT)}$", text, flags=re.MULTILINE)
    ]
    documents = [document for document in documents if document]
    if not documents:
        raise DataError(f"{path}: no documents")
    return documents


def simplicity(documents: Sequence[str]) -> NDArray[np.float64]:
    """The share of each document's words that are among the corpus's 1,000 most common."""
    counts = [Counter(WORD.findall(document.lower())) for document in documents]
    common = {word for word, _ in sum_counts(counts).most_common(COMMON_WORDS)}
    return np.array([sum(n for word, n in c.items() if word in common) / max(1, c.total()) for c in counts])


def sum_counts(counts: Sequence[Counter[str]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for each in counts:
        total.update(each)
    return total


@dataclass(frozen=True, kw_only=True)
class Diet:
    """Epochs for the simple documents and for the others.

    Simple are those up to `short_characters` long, and the simplest `simple_share` of all characters. A share of the
    readings drops the title, a first line that stands alone and ends no sentence, so that a prompt need not begin with
    one.
    """

    simple_share: float = 0.0
    short_characters: int = 0
    simple_epochs: float = 1.0
    other_epochs: float = 1.0
    untitled_share: float = 0.0

    def __post_init__(self) -> None:
        if min(self.simple_epochs, self.other_epochs) < 0 or max(self.simple_epochs, self.other_epochs) == 0:
            raise ValueError("simple_epochs and other_epochs must not be negative, nor both 0")

    def readings(self, documents: Sequence[str], seed: int) -> list[str]:
        """The documents in reading order."""
        rng = np.random.default_rng(seed)
        order = self.order(documents, rng)
        untitled = rng.random(len(order)) < self.untitled_share
        return [without_title(documents[i]) if bare else documents[i] for i, bare in zip(order, untitled, strict=True)]

    def order(self, documents: Sequence[str], rng: np.random.Generator) -> NDArray[np.int64]:
        """Document numbers in reading order."""
        times = np.floor(self._epochs(documents) + rng.random(len(documents))).astype(int)
        return rng.permutation(np.repeat(np.arange(len(documents)), times))

    def _epochs(self, documents: Sequence[str]) -> NDArray[np.float64]:
        simplest_first = np.argsort(-simplicity(documents), kind="stable")
        lengths = np.array([len(document) for document in documents])[simplest_first]
        is_simple = np.empty(len(documents), dtype=bool)
        is_simple[simplest_first] = lengths.cumsum() <= self.simple_share * lengths.sum()
        is_simple[simplest_first] |= lengths <= self.short_characters
        return np.where(is_simple, self.simple_epochs, self.other_epochs)


def without_title(document: str) -> str:
    """Without the first line, if a blank line follows it and it ends no sentence."""
    title, blank, text = document.partition("\n\n")
    is_title = blank and "\n" not in title and not title.endswith((".", '."', '!"', '?"'))
    return text if is_title else document
