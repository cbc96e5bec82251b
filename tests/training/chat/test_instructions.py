"""Every kind of question gets the tale it asks for, as much of it as there is room for, and in its own words."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from nvium_core.training.chat import instructions as made
from nvium_core.training.chat import wordings
from nvium_core.training.chat.conversations import Conversation
from nvium_core.training.chat.examples import example
from nvium_core.training.chat.instructions import Tale, Teller, asked, divided, instructions, tales
from nvium_core.training.chat.template import give_chat_template
from nvium_core.training.data.documents import Diet
from nvium_core.training.data.tokenizer import train_tokenizer

SENTENCE = "The fox number {n} met the crow, and the crow was glad to see a fox."
CONTEXT = 256


def tale_text(num_paragraphs: int, first: int = 0) -> str:
    return "\n\n".join(SENTENCE.format(n=first + n) for n in range(num_paragraphs))


DOCUMENTS = [f"Tale {n}\n\n{tale_text(1 + n, 100 * n)}" for n in range(40)]
"""The first are short and fit, the last are longer than any answer."""


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = train_tokenizer(DOCUMENTS, 300, context=CONTEXT)
    give_chat_template(tokenizer)
    return tokenizer


def conversations(tokenizer: PreTrainedTokenizerFast, seed: int = 0) -> list[Conversation]:
    return list(instructions(DOCUMENTS, Diet(other_epochs=3.0), tokenizer, CONTEXT, seed))


def contents(conversation: Conversation, role: str) -> list[str]:
    return [message["content"] for message in conversation if message["role"] == role]


def small_talk_answers() -> set[str]:
    return {answer for _, answers in wordings.SMALL_TALK for answer in answers}


def test_conversations_fit_alternate_and_end_with_an_answer(tokenizer: PreTrainedTokenizerFast) -> None:
    for conversation in conversations(tokenizer):
        roles = [message["role"] for message in conversation if message["role"] != "system"]
        assert roles == ["user", "assistant"] * (len(roles) // 2) and roles
        assert len(example(conversation, tokenizer)) <= CONTEXT
        assert all(message["content"] == message["content"].strip() != "" for message in conversation)


def test_answers_are_a_tales_own_words_in_its_order(tokenizer: PreTrainedTokenizerFast) -> None:
    texts = [document.partition("\n\n")[2] for document in DOCUMENTS]
    for conversation in conversations(tokenizer):
        told = [answer for answer in contents(conversation, "assistant") if answer not in small_talk_answers()]
        joined = "\n\n".join(told)
        assert not told or any(joined in text for text in texts)


def test_short_tales_are_told_whole(tokenizer: PreTrainedTokenizerFast) -> None:
    whole = {document.partition("\n\n")[2] for document in DOCUMENTS[:3]}
    rests = {text.partition("\n\n")[2] for text in whole}
    for conversation in conversations(tokenizer):
        answers = set(contents(conversation, "assistant")) - small_talk_answers()
        if any(answer.startswith(tuple(text[:20] for text in whole)) for answer in answers):
            assert answers <= whole | rests


def test_the_same_seed_makes_the_same_conversations(tokenizer: PreTrainedTokenizerFast) -> None:
    assert conversations(tokenizer, 1) == conversations(tokenizer, 1) != conversations(tokenizer, 2)


def test_all_ways_of_asking_are_used_and_system_messages_and_small_talk_now_and_then(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    said = [conversation for seed in range(2) for conversation in conversations(tokenizer, seed)]
    asks = " ".join(text for conversation in said for text in contents(conversation, "user"))
    for sign in ("Tale 1", "the crow", "short", "fox number", "ell me a story.", "Hello"):
        assert sign in asks, sign
    ordered = sum(bool(contents(conversation, "system")) for conversation in said)
    talked = sum(set(contents(conversation, "assistant")) <= small_talk_answers() for conversation in said)
    assert 0 < ordered < len(said) / 4 and 0 < talked < len(said) / 8


def test_a_title_that_several_documents_have_is_not_asked_for() -> None:
    long = "x" * 99
    known = tales(["Book\n\nA first.", "Book\n\nA second.", "Own\n\nA tale.", "no title", f"{long}\n\nA tale."])
    assert [tale.title for tale in known] == [None, None, "Own", None, None]
    assert [tale.text for tale in known][2:4] == ["A tale.", "no title"]


def questions(tale: Tale, number: int = 300) -> Counter[tuple[str, str]]:
    return Counter(asked(tale, np.random.default_rng(n)) for n in range(number))


def test_only_what_a_tale_has_is_asked_for() -> None:
    nameless = questions(Tale(None, [], "one two\n" * 300))
    assert {text.lower().rstrip(".!?") for text, _ in nameless} == {
        wording.lower().rstrip(".!?") for wording in wordings.ANYTHING
    }
    assert {rest for _, rest in nameless} == {"one two\n" * 300}


def test_an_opening_is_quoted_and_the_rest_is_told() -> None:
    begin, rest = "There once was a king who had three sons.", "The eldest left.\n\nThe others stayed."
    told = {rest_ for question, rest_ in questions(Tale(None, [], f"{begin} {rest}")) if begin in question}
    assert told == {rest}


def test_two_subjects_are_joined() -> None:
    asks = {question for question, _ in questions(Tale(None, ["a fox", "a crow"], tale_text(1)))}
    assert any("a fox and a crow" in question for question in asks)
    assert any("a crow" in question and "a fox" not in question for question in asks)


@settings(max_examples=60)
@given(
    parts=st.lists(st.sampled_from(["The fox ran. ", '"Oh!" he said. ', "and so on, ", "\n\n", "é "]), max_size=30),
    most=st.integers(1, 80),
)
def test_a_divided_text_loses_nothing_but_blanks_and_its_beginning_fits(
    tokenizer: PreTrainedTokenizerFast, parts: list[str], most: int
) -> None:
    text = "".join(parts).strip()
    begun, rest = divided(text, most, tokenizer)
    assert text.startswith(begun) and text[len(begun) :].strip() == rest.strip()
    assert begun == begun.strip()
    assert len(tokenizer.encode(begun, add_special_tokens=False)) <= most
    assert not rest or not begun or begun.endswith((".", '"')) or text[len(begun) :].startswith("\n\n")


def test_a_paragraph_is_preferred_to_a_sentence_unless_half_the_room_were_left(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    text = "One two. Three four. Five six.\n\nSeven. Eight."
    whole = len(tokenizer.encode(text, add_special_tokens=False))
    assert divided(text, whole, tokenizer) == (text, "")
    assert divided(text, whole - 1, tokenizer) == ("One two. Three four. Five six.", "Seven. Eight.")
    longer = f"One two.\n\n{'Five six. ' * 20}".strip()
    half = len(tokenizer.encode(longer, add_special_tokens=False)) // 2
    assert divided(longer, half, tokenizer)[0].count("Five six.") > 5


def test_a_tale_of_which_nothing_fits_is_left_out(tokenizer: PreTrainedTokenizerFast) -> None:
    endless = Tale("Endless", [], "and so " * 2000)
    teller = Teller(tokenizer, CONTEXT)
    told = [teller.conversation(endless, np.random.default_rng(n)) for n in range(50)]
    assert [] in told
    assert all(set(contents(conversation, "assistant")) <= small_talk_answers() for conversation in told)


def test_every_wording_has_the_blank_that_is_filled_in() -> None:
    title, subject, opening = "{title}", "{subject}", "{opening}"
    blanks = {"BY_TITLE": title, "BY_SUBJECT": subject, "SHORT_BY_SUBJECT": subject, "CONTINUE": opening}
    for name in ("ANYTHING", "SHORT", "GO_ON", "SYSTEM", *blanks):
        for wording in getattr(wordings, name):
            assert wording.count("{") == wording.count(blanks.get(name, "{}")) == (name in blanks)
    assert all(made.WAYS_OF_ASKING.values())
