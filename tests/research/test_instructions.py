import pytest
from transformers import PreTrainedTokenizerFast

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


def test_conversations_fit_alternate_end_with_an_answer_and_quote_a_tale(tokenizer):
    texts = [document.partition("\n\n")[2] for document in DOCUMENTS]
    small_talk = {answer for _, answers in wordings.SMALL_TALK for answer in answers}
    for conversation in instructions(DOCUMENTS, Diet(other_epochs=3.0), tokenizer, CONTEXT, seed=0):
        roles = [message["role"] for message in conversation if message["role"] != "system"]
        assert roles == ["user", "assistant"] * (len(roles) // 2) and roles
        assert len(example(conversation, tokenizer)) <= CONTEXT
        assert all(message["content"] == message["content"].strip() != "" for message in conversation)
        answers = [message["content"] for message in conversation if message["role"] == "assistant"]
        told = [answer for answer in answers if answer not in small_talk]
        assert not told or any("\n\n".join(told) in text for text in texts)
