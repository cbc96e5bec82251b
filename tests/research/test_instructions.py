"""Conversations made of tales: within the context, alternating, and verbatim."""

import pytest
from transformers import PreTrainedTokenizerFast

from nvium_core.training.chat.conversations import Conversation
from nvium_core.training.chat.examples import example
from nvium_core.training.data.documents import Diet
from nvium_core.training.data.tokenizer import train_tokenizer
from nvium_core.training.initial import give_chat_template
from research.tales import wordings
from research.tales.instructions import instructions

SENTENCE = "The fox number {n} met the crow, and the crow was glad to see a fox."
CONTEXT = 256


def tale_text(num_paragraphs: int, first: int = 0) -> str:
    return "\n\n".join(SENTENCE.format(n=first + n) for n in range(num_paragraphs))


DOCUMENTS = [f"Tale {n}\n\n{tale_text(1 + n, 100 * n)}" for n in range(40)]
"""The first tales are short and fit, the last are longer than any answer."""


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


def test_answers_quote_a_tale_in_order(tokenizer: PreTrainedTokenizerFast) -> None:
    texts = [document.partition("\n\n")[2] for document in DOCUMENTS]
    for conversation in conversations(tokenizer):
        told = [answer for answer in contents(conversation, "assistant") if answer not in small_talk_answers()]
        joined = "\n\n".join(told)
        assert not told or any(joined in text for text in texts)
