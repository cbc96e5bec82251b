"""The default chat template of fine-tuned models."""

from transformers import PreTrainedTokenizerBase

from nvium_core.text.chat_template import CHAT_TEMPLATE


def give_chat_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Set `CHAT_TEMPLATE` unless the tokenizer has a template.

    Raise `ValueError` unless its begin-of-text and end-of-text are the same token.
    """
    if tokenizer.chat_template:
        return
    if tokenizer.bos_token is None or tokenizer.bos_token != tokenizer.eos_token:
        raise ValueError(
            "the tokenizer has no chat template, and the default one needs the same token for bos_token and eos_token"
        )
    tokenizer.chat_template = CHAT_TEMPLATE
