"""Tales with known subjects: generated tales whose subjects are replaced, and short tales made from a plot."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import yaml

from research.tales.names import (
    INVENTED_SHARE,
    hero_of,
    invented_name,
    known_name,
    most_frequent,
    other_name,
    replaced,
    with_other_noun,
)
from research.tales.plots import draw_cast, draw_sentences, words

MORE_WORDS = Path(__file__).with_name("asked.yaml")
OTHER_HERO_SHARE, OTHER_NOUN_SHARE = 0.9, 0.8
NAME_OF_A_NOUN_SHARE = 0.3
"""Probability that a name is a noun, such as Marble or Whisker."""

ANYTHING_SHARE, INVENTED_NOUN_SHARE = 0.35, 0.08
"""Probabilities that a new noun is of any kind, and that it is invented (only if the request names the noun)."""

QUALITY_SHARE = 0.25
"""Probability that a noun has an adjective before it, as in "a wooden kite" (only if the request names the noun)."""

MIN_MENTIONS = 3
BEGINNING = 2  # number of sentences that may introduce the hero

THINGS = ("thing", "sight")
THING_SHARE = 0.55
"""Minimum share of short tales about an object or a sight."""

OTHER_OPENING_SHARE = 0.6
DETAIL_SHARE = 0.65
"""Probability that a detail follows a sentence of a short tale."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SubjectTale:
    """A tale with its subjects: the hero's name and kind, and an object or sight if there is one."""

    text: str
    hero: str | None
    being: str | None
    thing: str | None


@cache
def more_words() -> dict[str, Any]:
    read: dict[str, Any] = yaml.safe_load(MORE_WORDS.read_text(encoding="utf-8"))
    return read


def with_other_subjects(text: str, random: Random, *, may_invent: bool = False, new_names: bool = True) -> SubjectTale:
    """Replace the name, kind and object of a tale, each with some probability."""
    hero, being, thing = hero_of(text), being_of(text), thing_of(text)
    if hero and random.random() < OTHER_HERO_SHARE:
        name = draw_name(random, other_name(hero, random)) if new_names else known_name(hero, random)
        text, hero = replaced(text, hero, name), name
    if being and random.random() < OTHER_NOUN_SHARE:
        text, being = with_other(text, being, draw_noun("being", random, may_invent))
    if thing and random.random() < OTHER_NOUN_SHARE:
        field = "sight" if thing in words()["nouns"]["sight"] else "thing"
        text, thing = with_other(text, thing, draw_noun(field, random, may_invent))
    return SubjectTale(text=text, hero=hero, being=being, thing=thing)


def draw_name(random: Random, known: str) -> str:
    """Return the name `known`, or sometimes a noun as a name."""
    return random.choice(more_words()["anything"]).capitalize() if random.random() < NAME_OF_A_NOUN_SHARE else known


def draw_noun(field: str, random: Random, may_invent: bool) -> str:
    if may_invent and random.random() < INVENTED_NOUN_SHARE:
        return invented_name(random).lower()
    if random.random() < ANYTHING_SHARE:
        field = "anything"
    noun = random.choice(nouns(field))
    if may_invent and random.random() < QUALITY_SHARE:
        return f"{random.choice([word for word in more_words()['qualities'] if word not in noun.split()])} {noun}"
    return noun


@cache
def nouns(field: str) -> Sequence[str]:
    known = {"being": words()["beings"], "anything": []} | words()["nouns"]
    return [*known[field], *more_words()[field]]


def with_other(text: str, noun: str, other: str) -> tuple[str, str]:
    """Replace `noun` by `other`, unless the tale contains `other` or the plural of `noun`."""
    if mentions(text, other) or mentions(text, f"{noun}e?s"):
        return text, noun
    return with_other_noun(text, noun, other), other


def being_of(text: str) -> str | None:
    """Return the hero's kind: the first being that the first sentences mention."""
    beginning = " ".join(re.split(r"(?<=[.!?])\s", text)[:BEGINNING])
    beings = {*words()["beings"], *words()["children"].values()}
    return next((word for word in re.findall(r"\w+", beginning) if word in beings), None)


def thing_of(text: str) -> str | None:
    """Return the plot's object or sight: a noun that is mentioned often, and once after "a", "an" or its adjective."""
    introduced = {*re.findall(r"\b[Aa]n? (\w+)", text)}
    known = [noun for field in THINGS for noun in words()["nouns"][field] if noun in introduced]
    owned = [thing.split()[-1] for thing in words()["nouns"]["object"] if thing in text and thing != "new shoes"]
    return most_frequent(text, known + owned, MIN_MENTIONS)


def begun_with_its_thing(tale: SubjectTale) -> SubjectTale:
    """Drop the first paragraph of a tale if the next one begins with a sentence about the hero and the thing."""
    _, _, text = tale.text.partition("\n\n")
    [opening, *_] = re.split(r"(?<=[.!?])\s", text, maxsplit=1)
    if not (mentions(opening, tale.hero) and mentions(opening, tale.thing)):
        return tale
    return replace(tale, text=text, being=tale.being if mentions(text, tale.being) else None)


def mentions(text: str, noun: str | None) -> bool:
    return bool(noun and re.search(rf"\b{noun}\b", text))


def short_tale(random: Random, *, may_invent: bool = False, new_names: bool = True) -> SubjectTale:
    """Make a tale from a plot's sentences. Details follow some of them."""
    cast = draw_cast(random, drawn_nouns(random, may_invent))
    if new_names:
        cast["name"] = draw_name(random, invented_name(random) if random.random() < INVENTED_SHARE else cast["name"])
    parts = draw_parts(random)
    opening, *others = draw_sentences(random, parts)
    if random.random() < OTHER_OPENING_SHARE:
        opening = random.choice(more_words()["openings"])
    sentences = [*map(" ".join, zip([opening, *others], draw_details(random), strict=True))]
    text = "\n\n".join(sentence.strip() for sentence in sentences)
    thing = next((cast[field] for field in THINGS if is_about(field, parts)), None)
    being = cast["being"] if re.search(r"being}|kind}", text) else None
    return SubjectTale(text=text.format_map(cast), hero=cast["name"], being=being, thing=thing)


def drawn_nouns(random: Random, may_invent: bool) -> dict[str, Any]:
    """Return the words of plots.yaml, reduced to one random being, object and sight."""
    drawn = {field: [draw_noun(field, random, may_invent)] for field in ("being", *THINGS)}
    return words() | {"beings": drawn.pop("being"), "nouns": words()["nouns"] | drawn}


def draw_parts(random: Random) -> Sequence[Sequence[str]]:
    turns: list[Sequence[Sequence[str]]] = list(words()["turns"].values())
    with_thing = [parts for parts in turns if any(is_about(field, parts) for field in THINGS)]
    return random.choice(with_thing if random.random() < THING_SHARE else turns)


def is_about(field: str, parts: Sequence[Sequence[str]]) -> bool:
    return all(any(f"{field}}}" in sentence for sentence in choices) for choices in parts[:2])


def draw_details(random: Random) -> list[str]:
    """Sample a detail, or nothing, to follow each sentence of a plot. Nothing follows the ending."""
    details = [random.choice(choices) if random.random() < DETAIL_SHARE else "" for choices in more_words()["details"]]
    return [*details, ""]
