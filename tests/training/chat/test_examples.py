import numpy as np
import pytest

from nvium_core.training.chat.conversations import assistant, system, user
from nvium_core.training.chat.examples import example
from nvium_core.training.data.corpus import END_OF_TEXT
from nvium_core.training.errors import DataError


def test_only_answers_and_their_end_of_text_count(tokenizer):
    talk = [system("be big"), user(" the cat\n"), assistant("it ran"), user("so"), assistant("it sat"), user("and")]
    tuned = example(talk, tokenizer)
    parts = np.split(tuned.tokens, np.flatnonzero(np.diff(tuned.is_answer)) + 1)
    assert [tokenizer.decode(part) for part in parts] == [
        f"{END_OF_TEXT}System:\nbe big{END_OF_TEXT}User:\nthe cat{END_OF_TEXT}Assistant:\n",
        f"it ran{END_OF_TEXT}",
        f"User:\nso{END_OF_TEXT}Assistant:\n",
        f"it sat{END_OF_TEXT}",
    ]
    assert tuned.is_answer[-1] and not tuned.is_answer[0]


def test_all_of_a_plain_text_counts_and_is_tokenized_as_in_the_server(tokenizer):
    plain = example("the cat ran", tokenizer)
    assert tokenizer.decode(plain.tokens) == f"{END_OF_TEXT}the cat ran{END_OF_TEXT}"
    assert plain.tokens[:-1].tolist() == tokenizer("the cat ran").input_ids
    assert plain.is_answer.tolist() == [False] + [True] * (len(plain) - 1)
    with pytest.raises(DataError, match="special token"):
        example(f"the {END_OF_TEXT} cat", tokenizer)


def test_a_template_that_changes_earlier_answers_is_refused(tokenizer):
    tokenizer.chat_template = "{{ bos_token + messages[-1].content }}"
    assert example([user("the cat"), assistant("ran")], tokenizer).is_answer.any()
    with pytest.raises(DataError, match="changes an answer when another message follows"):
        example([user("the cat"), assistant("ran"), user("so"), assistant("sat")], tokenizer)
