"""Find and replace the names and objects of tales. Many names are invented, so that a model learns to copy them."""

import re
from collections.abc import Sequence
from functools import cache
from random import Random

from tokenizers import Tokenizer

from nvium_core.loading import bundled_model
from research.tales.plots import article, words

INVENTED_SHARE, PIECES_SHARE = 0.75, 0.5
"""Share of new names that are invented, and share of these that end with tokens. The others blend two known names."""

PIECES = (1, 1, 1, 2)
"""One of these numbers of tokens, chosen at random, follows the beginning of a known name."""

RUDE = re.compile("shit|cunt|fuck|dick|cock|nig|tit|poo|sex|rape|slut|whor|anus|penis|bast|piss")
"""Names that contain these letters are drawn again."""


def hero_of(tale: str) -> str | None:
    """Return the name from plots.yaml that occurs most often in the tale."""
    return most_frequent(tale, [name for names in words()["names"].values() for name in names], least=1)


def most_frequent(tale: str, choices: Sequence[str], least: int) -> str | None:
    mentions = re.findall(r"\w+", tale)
    best = max(choices, key=mentions.count, default="")
    return best if best and mentions.count(best) >= least else None


def other_name(hero: str, random: Random) -> str:
    """Return an invented name, or a known one."""
    return invented_name(random) if random.random() < INVENTED_SHARE else known_name(hero, random)


def known_name(hero: str, random: Random) -> str:
    """Return a random name from plots.yaml with the hero's pronouns."""
    [alike] = [names for names in words()["names"].values() if hero in names]
    return str(random.choice(alike))


def invented_name(random: Random) -> str:
    """Return a new name. The text depends on the bundled model's tokenizer."""
    while RUDE.search(name := blended_name(random).lower()):
        pass
    return name.capitalize()


def blended_name(random: Random) -> str:
    first, second = random.sample([name for names in words()["names"].values() for name in names], 2)
    if random.random() < PIECES_SHARE:
        return str(first[: random.randint(1, 3)] + "".join(random.choices(word_pieces(), k=random.choice(PIECES))))
    return str(first[: random.randint(2, len(first))] + second[random.randint(1, len(second) - 1) :])


@cache
def word_pieces() -> list[str]:
    """Return the bundled tokenizer's tokens inside words. A model can only copy tokens that it was trained on."""
    vocabulary = Tokenizer.from_file(str(bundled_model() / "tokenizer.json")).get_vocab()
    return sorted(token for token in vocabulary if re.fullmatch("[a-z]{2,7}", token))


def with_other_noun(tale: str, noun: str, other: str) -> str:
    return replaced(re.sub(rf"\b([Aa])n? {noun}\b", rf"\1{article(other)[1:]} {other}", tale), noun, other)


def replaced(text: str, word: str, other: str) -> str:
    return re.sub(rf"\b{word}\b", other, text)
