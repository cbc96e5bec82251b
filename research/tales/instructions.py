"""Make conversations of stories: the user asks for a tale, and the assistant tells it.

A request names the tale's title, subject or first sentences, or asks for a short tale or any tale. A tale that fits
into the context is told completely. A longer tale stops at the end of a paragraph and continues on request.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from nvium_core.training.chat.conversations import Conversation, assistant, system, user
from nvium_core.training.chat.examples import prompt_tokens
from nvium_core.training.data.documents import Diet, without_title
from research.tales import wordings
from research.tales.subjects import Subjects

SHORT_CHARACTERS = 1500
"""Maximum length of a short tale. Short tales are always told completely."""

BEGINNING_CHARACTERS = 6000
"""Subjects of a tale are taken from this many characters at its beginning."""

MAX_TITLE_CHARACTERS = 80
MIN_TOKENS = 64
"""Minimum number of free tokens for an answer."""

CHARACTERS_PER_TOKEN = 6  # upper bound, to avoid tokenizing a whole novel

REQUEST_KINDS = {"title": 0.2, "subject": 0.4, "short": 0.15, "opening": 0.15, "anything": 0.1}
SMALL_TALK_SHARE = 0.04
SYSTEM_SHARE = 0.1
GREETING_SHARE = 0.05
TWO_SUBJECTS_SHARE = 0.3
CARELESS_SHARE = 0.2
PART_SHARE = 0.3
"""Probability of telling only a part of a tale, even if all of it fits."""

OPENING = re.compile(r"[^\n]{20,240}?[.!?][\"']?(?=\s)")
PARAGRAPH_END = re.compile(r"(?<=\S)(?=\n\n)")
SENTENCE_END = re.compile(r"[.!?][\"')]*(?=\s)")

Rng = np.random.Generator


@dataclass(frozen=True)
class Tale:
    """A tale. `title` is None if other tales have the same title."""

    title: str | None
    subjects: Sequence[str]
    text: str

    @property
    def is_short(self) -> bool:
        return len(self.text) <= SHORT_CHARACTERS


def tales(documents: Sequence[str]) -> list[Tale]:
    """Parse documents (title, blank line, text) as tales. Omit a title that several documents share."""
    texts = [without_title(document).strip() for document in documents]
    titles = [document.strip().removesuffix(text).strip() for document, text in zip(documents, texts, strict=True)]
    beginnings = [text[:BEGINNING_CHARACTERS] for text in texts]
    times, subjects = Counter(titles), Subjects(beginnings)
    usable = [title if times[title] == 1 and 0 < len(title) <= MAX_TITLE_CHARACTERS else None for title in titles]
    return [Tale(title, subjects.of(begun), text) for title, begun, text in zip(usable, beginnings, texts, strict=True)]


def instructions(
    documents: Sequence[str], diet: Diet, tokenizer: PreTrainedTokenizerBase, context: int, seed: int
) -> Iterator[Conversation]:
    """Yield conversations that tell the documents, in the order of the diet. Each has at most `context` tokens.

    The result depends only on the arguments. A document is skipped if not even its first sentence fits.
    """
    known, teller = tales(documents), Teller(tokenizer, context)
    for number, index in enumerate(diet.order(documents, np.random.default_rng(seed))):
        conversation = teller.conversation(known[index], np.random.default_rng((seed, number)))
        if conversation:
            yield conversation


@dataclass(frozen=True)
class Teller:
    """Makes conversations that fit into a context."""

    tokenizer: PreTrainedTokenizerBase
    context: int

    def conversation(self, tale: Tale, rng: Rng) -> Conversation:
        """Make a conversation with a request for the tale, or sometimes small talk. Return [] if nothing fits."""
        if rng.random() < SMALL_TALK_SHARE:
            return exchange(wordings.SMALL_TALK[rng.integers(len(wordings.SMALL_TALK))], rng)
        question, text = request_for(tale, rng)
        return self.extended([*opened(rng), user(question)], text, rng, in_parts=not tale.is_short)

    def extended(self, turns: Conversation, text: str, rng: Rng, *, in_parts: bool) -> Conversation:
        """Extend a conversation by a text, in one or several parts, up to the end of the context."""
        extended: Conversation = []
        while text and (room := self.room(turns)) >= MIN_TOKENS:
            is_part = in_parts and rng.random() < PART_SHARE
            part, text = divided(text, int(rng.integers(MIN_TOKENS, room + 1)) if is_part else room, self.tokenizer)
            if not part:
                break
            extended = [*turns, assistant(part)]
            turns = [*extended, user(worded(wordings.GO_ON, rng))]
        return extended

    def room(self, turns: Conversation) -> int:
        """Return the tokens left for an answer without its end-of-text."""
        return self.context - len(prompt_tokens(turns, self.tokenizer)) - 1


def divided(text: str, most_tokens: int, tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """Split a text so that the first part has at most `most_tokens` tokens.

    If the whole text fits, it is the first part. Otherwise, the first part ends with a paragraph or, if a paragraph
    would leave half of the tokens unused, with a sentence. If no sentence fits, the first part is empty.
    """
    begun = text[: most_tokens * CHARACTERS_PER_TOKEN]
    offsets = tokenizer(begun, add_special_tokens=False, return_offsets_mapping=True, verbose=False)["offset_mapping"]
    if begun == text and len(offsets) <= most_tokens:
        return text, ""
    limit = offsets[min(most_tokens, len(offsets)) - 1][1]
    end = last_end(PARAGRAPH_END, begun, limit)
    if end < limit // 2:
        end = max(end, last_end(SENTENCE_END, begun, limit))
    return text[:end], text[end:].lstrip()


def last_end(pattern: re.Pattern[str], text: str, limit: int) -> int:
    """Return the end of the last match within `limit` characters, or 0."""
    return max((match.end() for match in pattern.finditer(text) if match.end() <= limit), default=0)


def opened(rng: Rng) -> Conversation:
    """Return turns before the request: rarely a system message, rarely a greeting, usually nothing."""
    ordered = [system(chosen(wordings.SYSTEM, rng))] if rng.random() < SYSTEM_SHARE else []
    greeted = exchange(wordings.SMALL_TALK[0], rng) if rng.random() < GREETING_SHARE else []
    return ordered + greeted


def exchange(talk: tuple[Sequence[str], Sequence[str]], rng: Rng) -> Conversation:
    questions, answers = talk
    return [user(worded(questions, rng)), assistant(chosen(answers, rng))]


def request_for(tale: Tale, rng: Rng) -> tuple[str, str]:
    """Return a request for a tale, and the text to tell."""
    opening = OPENING.match(tale.text)
    suits = {"title": tale.title, "subject": tale.subjects, "short": tale.is_short, "opening": opening}
    kinds = {kind: share for kind, share in REQUEST_KINDS.items() if suits.get(kind, True)}
    kind = chosen(list(kinds), rng, list(kinds.values()))
    if kind == "opening" and opening:
        return worded(wordings.CONTINUE, rng, opening=opening.group()), tale.text[opening.end() :].lstrip()
    if kind == "title":
        return worded(wordings.BY_TITLE, rng, title=tale.title), tale.text
    if kind == "anything" or not tale.subjects:
        return worded(wordings.SHORT if kind == "short" else wordings.ANYTHING, rng), tale.text
    by_subject = wordings.SHORT_BY_SUBJECT if kind == "short" else wordings.BY_SUBJECT
    return worded(by_subject, rng, subject=some_subjects(tale, rng)), tale.text


def some_subjects(tale: Tale, rng: Rng) -> str:
    """Return one or two subjects, such as "a fox and a crow"."""
    number = 2 if len(tale.subjects) > 1 and rng.random() < TWO_SUBJECTS_SHARE else 1
    return " and ".join(rng.permutation(tale.subjects)[:number])


def worded(wordings_: Sequence[str], rng: Rng, **blanks: str | None) -> str:
    """Fill the blanks of a random wording. Sometimes, start it in lower case and drop its full stop."""
    wording = chosen(wordings_, rng)
    if rng.random() < CARELESS_SHARE and not wording.startswith("{"):
        wording = wording[0].lower() + wording[1:].rstrip(".!?")
    return wording.format(**blanks)


def chosen(words: Sequence[str], rng: Rng, shares: Sequence[float] | None = None) -> str:
    weights = np.array(shares or [1.0] * len(words))
    return words[rng.choice(len(words), p=weights / weights.sum())]
