"""Filters for generated tales."""

import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import pairwise

import numpy as np

from research.tales.narrator import Tale
from research.tales.plots import WORDS, words

MIN_WORDS, MAX_WORDS = 60, 320
LONG_SENTENCE_WORDS = 4
"""Shorter sentences may repeat, as a refrain does."""

MAX_STRANGE_WORD_SHARE = 0.02
MIN_COUNT = 20
"""A word is simple if it occurs at least this often in the reference text."""

PLURALS = {"mouse": "mice"}
FEMALE, MALE = frozenset(["she", "her", "hers", "herself"]), frozenset(["he", "him", "his", "himself"])

MAX_OTHER_NAMES = 2
"""Maximum number of names in a tale besides its hero's."""

SHINGLE_WORDS, NUM_HASHES, HASHES_PER_BAND = 5, 32, 4
MAX_SIMILARITY = 0.6
"""Of two tales with at least this share of equal hashes, the later one is a near-duplicate."""

WORD = re.compile(r"[A-Za-z]+(?:'[a-z]+)?")
SENTENCE_END = re.compile(r'(?<=[.!?])["\']?\s+|\n+')
NAME_INSIDE = re.compile(r"(?<=[a-z,] )[A-Z][a-z]+")
TITLES = frozenset(
    [
        "Mr",
        "Mrs",
        "Miss",
        "Dr",
        "Mama",
        "Papa",
        "Mom",
        "Dad",
        "Mother",
        "Father",
        "Grandma",
        "Grandpa",
        "Mommy",
        "Daddy",
    ]
)

Reason = str


def simple_words(text: str) -> frozenset[str]:
    """Return the frequent words of a text, and the words of plots.yaml."""
    counts = Counter(word.lower() for word in WORD.findall(text))
    given = {word.lower() for word in WORD.findall(WORDS.read_text(encoding="utf-8"))}
    return frozenset(given.union(word for word, count in counts.items() if count >= MIN_COUNT))


class Filter:
    def __init__(self, simple: Iterable[str]) -> None:
        self._simple = frozenset(simple)
        self._signatures: list[np.ndarray[tuple[int], np.dtype[np.uint64]]] = []
        self._bands: dict[tuple[int, bytes], list[int]] = {}
        self._checks: dict[Reason, Callable[[Tale], bool]] = {
            "no end": lambda tale: not tale.is_whole or tale.text[-1] not in '.!?"',
            "length": lambda tale: not MIN_WORDS <= len(tale.text.split()) <= MAX_WORDS,
            "not plain English letters": lambda tale: not tale.text.isascii(),
            "open quotation": lambda tale: any(part.count('"') % 2 for part in tale.text.split("\n")),
            "repeated sentence": lambda tale: repeats_a_sentence(tale.text),
            "no hero at the end": lambda tale: not keeps_hero(tale.name, tale.text),
            "its thing does not return": lambda tale: not keeps_thing(tale.text),
            "another pronoun": lambda tale: not keeps_pronoun(*halves(tale.text)),
            "strange words": lambda tale: self._strange_words(tale) > MAX_STRANGE_WORD_SHARE,
            "too many names": lambda tale: num_other_names(tale) > MAX_OTHER_NAMES,
            "near-duplicate": lambda tale: self._is_known(tale.text),
        }

    @property
    def reasons(self) -> list[Reason]:
        return list(self._checks)

    def reason_against(self, tale: Tale) -> Reason | None:
        """Return the first reason to drop a tale. If there is none, remember the tale and return None."""
        return next((reason for reason, is_so in self._checks.items() if is_so(tale)), None)

    def _strange_words(self, tale: Tale) -> float:
        words = [word.lower() for word in WORD.findall(tale.text)]
        return sum(not self._knows(word, tale.name.lower()) for word in words) / len(words)

    def _knows(self, word: str, name: str) -> bool:
        return word in self._simple or word.removesuffix("'s") in self._simple or word.removesuffix("'s") == name

    def remember(self, text: str) -> None:
        """Make the filter drop later near-duplicates of this text."""
        self._is_known(text)

    def _is_known(self, text: str) -> bool:
        signature = minhash(text)
        bands = [(place, band.tobytes()) for place, band in enumerate(signature.reshape(-1, HASHES_PER_BAND))]
        alike = {other for band in bands for other in self._bands.get(band, ())}
        if any((self._signatures[other] == signature).mean() >= MAX_SIMILARITY for other in alike):
            return True
        for band in bands:
            self._bands.setdefault(band, []).append(len(self._signatures))
        self._signatures.append(signature)
        return False


def repeats_a_sentence(text: str) -> bool:
    sentences = [sentence.strip(" \"'").lower() for sentence in SENTENCE_END.split(text)]
    long = [sentence for sentence in sentences if len(sentence.split()) >= LONG_SENTENCE_WORDS]
    return len(set(long)) < len(long) or any(one == other for one, other in pairwise(sentences))


def keeps_hero(name: str, text: str) -> bool:
    """Return True if the last third of the words mentions the hero."""
    words = WORD.findall(text)
    return name in {word.removesuffix("'s") for word in words[-max(1, round(len(words) / 3)) :]}


def returns_to(noun: str, text: str) -> bool:
    """Return True if the last two thirds of the words contain the noun or its plural."""
    words = WORD.findall(text.lower())
    return not forms(noun).isdisjoint(word.removesuffix("'s") for word in words[len(words) // 3 :])


def forms(noun: str) -> frozenset[str]:
    """Return a noun and its plural, and words that merely look like its plural."""
    plurals = {f"{noun}s", f"{noun}es", f"{noun[:-1]}ies", f"{noun[:-1]}ves", PLURALS.get(noun, noun)}
    return frozenset(plurals | {noun})


def keeps_thing(text: str) -> bool:
    """Return True if a tale returns to the object of its first sentence, or if there is none."""
    thing = opening_thing(text)
    return thing is None or returns_to(thing, text)


def halves(text: str) -> tuple[str, str]:
    return text[: len(text) // 2], text[len(text) // 2 :]


def opening_thing(text: str) -> str | None:
    """Return the first object of plots.yaml that the first sentence mentions."""
    objects = frozenset(words()["nouns"]["thing"])
    return next((word for word in WORD.findall(SENTENCE_END.split(text)[0].lower()) if word in objects), None)


def keeps_pronoun(opening: str, text: str) -> bool:
    """Return True unless most pronouns of the text have the other gender than most pronouns of the opening."""
    return gender(opening) * gender(text) >= 0


def gender(text: str) -> int:
    """Return how many more pronouns are female than male."""
    words_ = WORD.findall(text.lower())
    return sum(word in FEMALE for word in words_) - sum(word in MALE for word in words_)


def num_other_names(tale: Tale) -> int:
    """Count the names inside sentences, except the hero's."""
    return len(set(NAME_INSIDE.findall(tale.text)) - TITLES - {tale.name})


def minhash(text: str) -> "np.ndarray[tuple[int], np.dtype[np.uint64]]":
    """Compute the MinHash signature [NUM_HASHES] of a text's shingles."""
    words = [word.lower() for word in WORD.findall(text)]
    shingles = [" ".join(words[start : start + SHINGLE_WORDS]) for start in range(len(words) - SHINGLE_WORDS + 1)]
    hashes = np.array([zlib.crc32(shingle.encode()) for shingle in shingles], dtype=np.uint64)
    factors, offsets = np.random.default_rng(0).integers(1, 2**31, (2, NUM_HASHES, 1), dtype=np.uint64)
    lowest: np.ndarray[tuple[int], np.dtype[np.uint64]] = ((hashes * factors + offsets) % PRIME).min(axis=1)
    return lowest


PRIME = np.uint64(2**31 - 1)
