"""Find the subjects of an English tale: nouns and names that are rare in other tales.

Nouns and names are recognised by the words next to them.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence

NOUN_PHRASE = re.compile(
    r"\b(?i:(a|an|the)) ([a-z]{3,})"
    r"(?=[.,;:!?]| (?:and|as|at|came|did|from|had|has|in|is|of|said|that|to|was|went|were|who|with)\b)"
)
"""An article and a lower-case word. After it comes punctuation or a word that rarely follows adjectives."""

NAME = re.compile(r"(?<=[a-z,] )[A-Z][a-z]{2,}\b(?!\.? [A-Z])")
"""A single capitalised word inside a sentence."""

MIN_MENTIONS = 2
COMMON_NOUN = 20  # a capitalised word counts as a noun if the tales contain it this often as a lower-case noun
MIN_INDEFINITE_SHARE = 0.1  # share of mentions after "a" or "an"; uncountable nouns such as "water" have less
NOT_SUBJECTS = re.compile(
    r"(day|time|way|one|other|matter|end|morning|evening|night|place|side|thing|kind|sort|part|case|point|word|couple)s?"
    r"|rest|first|last|same|moment|fact|sake|middle|top|next|two|three|more|most"
)
"""Nouns too common to ask about."""


def noun_phrases(text: str) -> Iterator[tuple[str, str]]:
    """Yield each noun with its article in lower case, such as ("a", "fox")."""
    for article, noun in NOUN_PHRASE.findall(text):
        if not NOT_SUBJECTS.fullmatch(noun):
            yield article.lower(), noun


class Subjects:
    """Finds the subjects of a tale by comparing it with many others."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._num_texts = len(texts)
        self._phrases = Counter(phrase for text in texts for phrase in noun_phrases(text))
        self._num_nouns = Counter[str]()
        for (_, noun), n in self._phrases.items():
            self._num_nouns[noun] += n
        self._num_texts_with = Counter(subject for text in texts for subject in self._mentions(text))

    def of(self, text: str, most: int = 3) -> list[str]:
        """Return the phrases with the highest mentions × log inverse frequency, such as "a fox" or "Dorothy"."""
        weights = {subject: n * self._rarity(subject) for subject, n in self._mentions(text).items()}
        return sorted(weights, key=lambda subject: (-weights[subject], subject))[:most]

    def _mentions(self, text: str) -> dict[str, int]:
        """Count the mentions of subjects that occur at least twice."""
        counts = Counter(self._noun_subject(noun) for _, noun in noun_phrases(text))
        counts.update(map(self._name_subject, NAME.findall(text)))
        return {subject: n for subject, n in counts.items() if n >= MIN_MENTIONS}

    def _noun_subject(self, noun: str) -> str:
        """Return the noun with "a", "an" or, if these articles are rare before the noun, "the"."""
        indefinite = max(("a", noun), ("an", noun), key=self._phrases.__getitem__)
        is_usual = self._phrases[indefinite] > MIN_INDEFINITE_SHARE * self._num_nouns[noun]
        return f"{indefinite[0]} {noun}" if is_usual else f"the {noun}"

    def _name_subject(self, name: str) -> str:
        """Return the name, or the noun if the name is also a common noun, such as an animal in a fable."""
        noun = name.lower()
        return self._noun_subject(noun) if self._num_nouns[noun] >= COMMON_NOUN else name

    def _rarity(self, subject: str) -> float:
        return math.log((1 + self._num_texts) / (1 + self._num_texts_with[subject]))
