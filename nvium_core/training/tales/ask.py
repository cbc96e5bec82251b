"""Lines to tune a story-teller on: a question that a tale answers, or a tale alone, so that it goes on telling unasked.

Half of the tales are a teller's, told again of others, half are short. So a model learns to read whom and what it is
to tell of, rather than to know it.
"""

from collections.abc import Iterable, Iterator, Sequence
from random import Random

import numpy as np

from nvium_core.training.chat import wordings
from nvium_core.training.chat.conversations import Line, assistant, user
from nvium_core.training.chat.instructions import OPENING, SMALL_TALK_SHARE, exchange, opened, worded
from nvium_core.training.tales.plots import article
from nvium_core.training.tales.told import Told, short_tale, thing_of, told_of_others

TEXT_SHARE = 0.3
"""Of the lines, plain tales."""

THING_TIMES = 3
"""Tales about a thing or a sight are told so often for each of the others."""

WAYS_OF_ASKING = {"subject": 0.6, "named": 0.1, "short": 0.1, "opening": 0.1, "anything": 0.1}
SUBJECTS_SHARES = {"thing": 0.6, "being": 0.2, "both": 0.2}
"""What is asked for if a tale has a thing."""


def asked(tales: Sequence[str], times: int, seed: int) -> Iterator[Line]:
    """Made tales in another order each time, with a short tale after each."""
    random, rng = Random(seed), np.random.default_rng(seed)
    for told in told_in_turn(tales, times, random):
        yield told.text if random.random() < TEXT_SHARE else conversation(told, random, rng)


def told_in_turn(tales: Sequence[str], times: int, random: Random) -> Iterator[Told]:
    often = [tale for tale in tales for _ in range(THING_TIMES if thing_of(tale) else 1)]
    for _ in range(times):
        for tale in random.sample(often, len(often)):
            yield told_of_others(tale, random)
            yield short_tale(random)


def conversation(told: Told, random: Random, rng: np.random.Generator) -> Line:
    """A request for the tale or, now and then, something else."""
    if random.random() < SMALL_TALK_SHARE:
        return exchange(random.choice(wordings.SMALL_TALK), rng)
    question, text = question_and_answer(told, random, rng)
    return [*opened(rng), user(question), assistant(text)]


def question_and_answer(told: Told, random: Random, rng: np.random.Generator) -> tuple[str, str]:
    [way] = random.choices([*WAYS_OF_ASKING], [*WAYS_OF_ASKING.values()])
    if way == "opening" and (opening := OPENING.match(told.text)):
        return worded(wordings.CONTINUE, rng, opening=opening.group()), told.text[opening.end() :].lstrip()
    if way == "named" and told.being and told.hero:
        called = f"{with_article(told.being)} {random.choice(['called', 'named'])} {told.hero}"
        return worded(wordings.BY_SUBJECT, rng, subject=called), told.text
    subject = " and ".join(map(with_article, subjects(told, random)))
    if way == "anything" or not subject:
        return worded(wordings.SHORT if way == "short" else wordings.ANYTHING, rng), told.text
    by_subject = wordings.SHORT_BY_SUBJECT if way == "short" else wordings.BY_SUBJECT
    return worded(by_subject, rng, subject=subject), told.text


def subjects(told: Told, random: Random) -> Iterable[str]:
    """One or two nouns, or none."""
    known = [noun for noun in (told.being, told.thing) if noun]
    if not (told.being and told.thing):
        return known
    [choice] = random.choices([*SUBJECTS_SHARES], [*SUBJECTS_SHARES.values()])
    return {"thing": [told.thing], "being": [told.being], "both": random.sample(known, 2)}[choice]


def with_article(noun: str) -> str:
    return f"{article(noun)} {noun}"
