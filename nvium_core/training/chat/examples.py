"""Conversations and plain texts as token ids for fine-tuning.

The tokenizer's chat template renders prompts, as in the server. So training and serving use the same prompts.

Shapes: T tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from nvium_core.training.chat.conversations import Conversation, Line, Message
from nvium_core.training.errors import DataError


@dataclass(frozen=True, eq=False)
class Example:
    """Token ids [T] of a conversation or a plain text. `is_answer` [T] marks the tokens that count in the loss.

    In a conversation, these tokens are the assistant's answers, each with its end-of-text. In a plain text, they are
    all tokens except begin-of-text. `is_continued`: the text begins in the example before.
    """

    tokens: NDArray[np.int64]
    is_answer: NDArray[np.bool_]
    is_continued: bool = False

    def __len__(self) -> int:
        return len(self.tokens)

    def cut(self, length: int) -> "Example":
        return Example(self.tokens[:length], self.is_answer[:length])


def prompt_tokens(messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Render messages with the chat template, up to the start of the assistant's next answer, and tokenize them."""
    text = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
    assert isinstance(text, str)
    return tokenizer.encode(text, add_special_tokens=False, verbose=False)


def example(line: Line, tokenizer: PreTrainedTokenizerBase) -> Example:
    """Tokenize a plain text, from begin-of-text to end-of-text, or a conversation up to its last answer.

    Raise `DataError` if a text contains a special token, or if the chat template changes an answer when another message
    follows the answer.
    """
    if not isinstance(line, str):
        return conversation_example(line, tokenizer)
    check_plain([line], tokenizer)
    tokens = np.array([*tokenizer.encode(line, verbose=False), tokenizer.eos_token_id])
    is_answer = np.full(len(tokens), True)
    is_answer[0] = tokens[0] != tokenizer.bos_token_id
    return Example(tokens, is_answer)


def conversation_example(conversation: Conversation, tokenizer: PreTrainedTokenizerBase) -> Example:
    check_plain([message["content"] for message in conversation], tokenizer)
    tokens, is_answer = list[int](), list[bool]()
    for index, message in enumerate(conversation):
        if message["role"] != "assistant":
            continue
        prompt = prompt_tokens(conversation[:index], tokenizer)
        if prompt[: len(tokens)] != tokens:
            raise DataError(
                "the chat template changes an answer when another message follows; "
                "split the conversation so that every line has only one answer"
            )
        text = tokenizer.encode(message["content"], add_special_tokens=False, verbose=False)
        answer = [*text, tokenizer.eos_token_id]
        is_answer += [False] * (len(prompt) - len(tokens)) + [True] * len(answer)
        tokens = prompt + answer
    return Example(np.array(tokens), np.array(is_answer))


def check_plain(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise `DataError` if a text contains a special token. The server would tokenize such a token as plain text."""
    for token in tokenizer.all_special_tokens:
        if any(token in text for text in texts):
            raise DataError(f"a text contains the special token {token}; remove it")
