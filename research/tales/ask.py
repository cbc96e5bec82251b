"""Fine-tuning data: questions answered by tales, and tales alone, so that the model can still continue plain text.

By default, two short tales made from plots follow each generated tale, whose subjects are replaced. So the model learns
to copy the subject from the prompt instead of memorising it.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from random import Random

import numpy as np

from nvium_core.training.data.texts import Conversation, Line, assistant, system, user
from research.tales import wordings
from research.tales.plots import article
from research.tales.subject_tales import (
    SubjectTale,
    begun_with_its_thing,
    short_tale,
    thing_of,
    with_other_subjects,
)

THING_TIMES = 3
"""Tales about an object or a sight occur this many times as often as others."""

HERO_IN_REQUEST = ("named", "opening")
"""Kinds of lines whose request names the hero."""

KINDS = {"text": 0.2, "subject": 0.55, "named": 0.05, "short": 0.08, "opening": 0.06, "anything": 0.03, "talk": 0.03}
"""Probabilities of the kinds of lines. `text` is a tale without a request."""

BY_SUBJECT = ("subject", "short")
SUBJECTS_SHARES = {"thing": 0.7, "being": 0.15, "both": 0.15}
"""Probabilities of what a request names if the tale has both a being and an object."""

THING_FIRST = ("text", "opening")
"""Kinds of lines whose tale may begin with its object. Other requests may name a being, which this could leave out."""

THING_FIRST_SHARE = 0.8
"""Probability that a tale about an object then begins with the sentence that introduces it."""

SYSTEM_SHARE, GREETING_SHARE, CARELESS_SHARE = 0.1, 0.05, 0.2
OPENING = re.compile(r"[^\n]{20,240}?[.!?][\"']?(?=\s)")

Rng = np.random.Generator


def training_lines(
    tales: Sequence[str], times: int, seed: int, *, short_tales: int = 2, new_names: bool = True
) -> Iterator[Line]:
    """Yield `times` lines for each tale, in a new order each time, and `short_tales` short tales after each line."""
    random, rng = Random(seed), np.random.default_rng(seed)
    often = [tale for tale in tales for _ in range(THING_TIMES if thing_of(tale) else 1)]
    for _ in range(times):
        for tale in random.sample(often, len(often)):
            for text in (tale, *[None] * short_tales):
                yield line(text, random, rng, new_names)


def line(tale: str | None, random: Random, rng: Rng, new_names: bool) -> Line:
    """Make a line from a tale with replaced subjects, or from a short tale if `tale` is None."""
    [kind] = random.choices([*KINDS], [*KINDS.values()])
    if kind == "talk":
        return exchange(random.choice(wordings.SMALL_TALK), rng)
    words = {"may_invent": kind in BY_SUBJECT, "new_names": new_names or kind in HERO_IN_REQUEST}
    chosen = with_other_subjects(tale, random, **words) if tale else short_tale(random, **words)
    if kind in THING_FIRST and random.random() < THING_FIRST_SHARE:
        chosen = begun_with_its_thing(chosen)
    if kind == "text":
        return chosen.text
    question, answer = question_and_answer(kind, chosen, random, rng)
    return [*opened(rng), user(question), assistant(answer)]


def question_and_answer(kind: str, chosen: SubjectTale, random: Random, rng: Rng) -> tuple[str, str]:
    if kind == "opening" and (opening := OPENING.match(chosen.text)):
        return worded(wordings.CONTINUE, rng, opening=opening.group()), chosen.text[opening.end() :].lstrip()
    if kind == "named" and chosen.being and chosen.hero:
        called = f"{with_article(chosen.being)} {random.choice(['called', 'named'])} {chosen.hero}"
        return worded(wordings.BY_SUBJECT, rng, subject=called), chosen.text
    subject = " and ".join(map(with_article, subjects(chosen, random)))
    if kind not in BY_SUBJECT or not subject:
        return worded(wordings.SHORT if kind == "short" else wordings.ANYTHING, rng), chosen.text
    by_subject = wordings.SHORT_BY_SUBJECT if kind == "short" else wordings.BY_SUBJECT
    return worded(by_subject, rng, subject=subject), chosen.text


def subjects(chosen: SubjectTale, random: Random) -> Iterable[str]:
    """Return the nouns that a request names: one or two, or none if the tale has no known subject."""
    known = [noun for noun in (chosen.being, chosen.thing) if noun]
    if not (chosen.being and chosen.thing):
        return known
    [choice] = random.choices([*SUBJECTS_SHARES], [*SUBJECTS_SHARES.values()])
    return {"thing": [chosen.thing], "being": [chosen.being], "both": random.sample(known, 2)}[choice]


def with_article(noun: str) -> str:
    return f"{article(noun)} {noun}"


def opened(rng: Rng) -> Conversation:
    """Return turns before the request: rarely a system message, rarely a greeting, usually nothing."""
    ordered = [system(chosen(wordings.SYSTEM, rng))] if rng.random() < SYSTEM_SHARE else []
    greeted = exchange(wordings.SMALL_TALK[0], rng) if rng.random() < GREETING_SHARE else []
    return ordered + greeted


def exchange(talk: tuple[Sequence[str], Sequence[str]], rng: Rng) -> Conversation:
    questions, answers = talk
    return [user(worded(questions, rng)), assistant(chosen(answers, rng))]


def worded(wordings_: Sequence[str], rng: Rng, **blanks: str | None) -> str:
    """Fill the blanks of a random wording. Sometimes, start it in lower case and drop its full stop."""
    wording = chosen(wordings_, rng)
    if rng.random() < CARELESS_SHARE and not wording.startswith("{"):
        wording = wording[0].lower() + wording[1:].rstrip(".!?")
    return wording.format(**blanks)


def chosen(words: Sequence[str], rng: Rng) -> str:
    shares = np.full(len(words), 1 / len(words))  # without them, seeds would make other data
    return words[rng.choice(len(words), p=shares)]
