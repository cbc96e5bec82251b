import pytest
from transformers import PreTrainedTokenizerFast

from nvium_core.training.data.source import train_tokenizer
from nvium_core.training.initial import give_chat_template
from tests.training.small_runs import WORDS


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of 280 tokens with the default chat template."""
    tokenizer = train_tokenizer([" ".join(WORDS)] * 20, 280, context=64)
    give_chat_template(tokenizer)
    return tokenizer
