"""Plots of tales: a subject, and the first sentence of every part, sampled from plots.yaml."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import yaml

WORDS = Path(__file__).with_name("plots.yaml")
PRONOUNS = (("she", "her", "her", "herself"), ("he", "him", "his", "himself"))
CHILD_SHARE = 0.2
"""Share of heroes that are children."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plot:
    """The prompt, the first sentence of each part, and the hero's name. The last sentence ends the tale."""

    request: str
    parts: list[str]
    name: str


@cache
def words() -> dict[str, Any]:
    read: dict[str, Any] = yaml.safe_load(WORDS.read_text(encoding="utf-8"))
    return read


def draw_plot(random: Random) -> Plot:
    turn, parts = random.choice(list(words()["turns"].items()))
    cast = draw_cast(random, words())
    sentences = draw_sentences(random, parts)
    request = random.choice(words()["requests"]).replace("{turn}", turn)
    return Plot(
        request=request.format_map(cast), parts=[part.format_map(cast) for part in sentences], name=cast["name"]
    )


def draw_sentences(random: Random, parts: Sequence[Sequence[str]]) -> list[str]:
    """Sample an opening, a sentence for each part, and an ending, with placeholders for the cast."""
    sentences = [random.choice(choices) for choices in (words()["openings"], *parts)]
    has_helper = any("helper}" in sentence for sentence in sentences)
    return [
        *sentences,
        random.choice([ending for ending in words()["endings"] if has_helper or "helper" not in ending]),
    ]


def draw_cast(random: Random, drawn: Mapping[str, Any]) -> dict[str, str]:
    """Sample a word from `drawn` for every placeholder. `drawn` has the structure of plots.yaml."""
    she, them, her, self_ = random.choice(PRONOUNS)
    nouns = {field: random.choice(choices) for field, choices in drawn["nouns"].items()}
    nouns["being"] = drawn["children"][she] if random.random() < CHILD_SHARE else random.choice(drawn["beings"])
    nouns["kind"] = f"{random.choice(drawn['characters'])} {nouns['being']}"
    with_article = {f"a_{field}": f"{article(noun)} {noun}" for field, noun in nouns.items()}
    cast: dict[str, str] = nouns | with_article | {"she": she, "them": them, "her": her, "self": self_}
    cast |= {field.capitalize(): cast[field].capitalize() for field in ("she", "her")}
    cast |= {field.capitalize(): cast[field].capitalize() for field in ("a_helper", "a_being")}
    cast |= {field: random.choice(choices) for field, choices in drawn["phrases"].items()}
    cast["name"] = random.choice(drawn["names"][she])
    return cast


def article(noun: str) -> str:
    return "an" if noun[0] in "aeiou" and not noun.startswith("uni") else "a"
