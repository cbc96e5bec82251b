"""Fine-tuning data: a question answered by a tale, or a tale alone, so the model still continues plain text.

A third of the tales are generated ones with other subjects, the others are short tales made of a plot's sentences. So
the model learns to copy the subject from the prompt instead of memorising it.
"""

from collections.abc import Iterable, Iterator, Sequence
from random import Random

import numpy as np

from nvium_core.training.chat.conversations import Line, assistant, user
from research.tales import wordings
from research.tales.instructions import OPENING, exchange, opened, worded
from research.tales.plots import article
from research.tales.told import Told, short_tale, thing_of, told_of_others

THING_TIMES = 3
"""How much more often tales about an object or a sight occur than the others."""

SHORT_TALES = 2
"""Short tales per generated tale."""

WAYS = {"text": 0.3, "subject": 0.41, "named": 0.06, "short": 0.08, "opening": 0.08, "anything": 0.04, "talk": 0.03}
"""Probabilities of the kinds of requests; `text` is a tale alone."""

BY_SUBJECT = ("subject", "short")
SUBJECTS_SHARES = {"thing": 0.6, "being": 0.2, "both": 0.2}
"""Probabilities of the requested subjects if a tale has an object."""


def asked(tales: Sequence[str], times: int, seed: int) -> Iterator[Line]:
    """Yield lines for the tales, reshuffled each time, with short tales in between."""
    random, rng = Random(seed), np.random.default_rng(seed)
    often = [tale for tale in tales for _ in range(THING_TIMES if thing_of(tale) else 1)]
    for _ in range(times):
        for tale in random.sample(often, len(often)):
            for text in (tale, *[None] * SHORT_TALES):
                yield line(text, random, rng)


def line(tale: str | None, random: Random, rng: np.random.Generator) -> Line:
    """Make a line of a tale with other subjects, or of a short tale if there is none."""
    [way] = random.choices([*WAYS], [*WAYS.values()])
    if way == "talk":
        return exchange(random.choice(wordings.SMALL_TALK), rng)
    may_invent = way in BY_SUBJECT
    told = told_of_others(tale, random, may_invent=may_invent) if tale else short_tale(random, may_invent=may_invent)
    if way == "text":
        return told.text
    question, answer = question_and_answer(way, told, random, rng)
    return [*opened(rng), user(question), assistant(answer)]


def question_and_answer(way: str, told: Told, random: Random, rng: np.random.Generator) -> tuple[str, str]:
    if way == "opening" and (opening := OPENING.match(told.text)):
        return worded(wordings.CONTINUE, rng, opening=opening.group()), told.text[opening.end() :].lstrip()
    if way == "named" and told.being and told.hero:
        called = f"{with_article(told.being)} {random.choice(['called', 'named'])} {told.hero}"
        return worded(wordings.BY_SUBJECT, rng, subject=called), told.text
    subject = " and ".join(map(with_article, subjects(told, random)))
    if way not in BY_SUBJECT or not subject:
        return worded(wordings.SHORT if way == "short" else wordings.ANYTHING, rng), told.text
    by_subject = wordings.SHORT_BY_SUBJECT if way == "short" else wordings.BY_SUBJECT
    return worded(by_subject, rng, subject=subject), told.text


def subjects(told: Told, random: Random) -> Iterable[str]:
    """Return up to two nouns."""
    known = [noun for noun in (told.being, told.thing) if noun]
    if not (told.being and told.thing):
        return known
    [choice] = random.choices([*SUBJECTS_SHARES], [*SUBJECTS_SHARES.values()])
    return {"thing": [told.thing], "being": [told.being], "both": random.sample(known, 2)}[choice]


def with_article(noun: str) -> str:
    return f"{article(noun)} {noun}"
