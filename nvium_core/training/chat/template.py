"""Gives tokenizers the chat template of models tuned here."""

from transformers import PreTrainedTokenizerBase

from nvium_core.text.chat_template import CHAT_TEMPLATE


def give_chat_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Set `CHAT_TEMPLATE`, unless the tokenizer has one. Its begin-of-text and end-of-text must be the same
    token."""
    if tokenizer.chat_template:
        return
    if tokenizer.bos_token is None or tokenizer.bos_token != tokenizer.eos_token:
        raise ValueError(
            "a tokenizer whose texts do not begin with their end-of-text token needs its own chat template"
        )
    tokenizer.chat_template = CHAT_TEMPLATE
