"""Train a byte-level BPE tokenizer, and save it as a plain `PreTrainedTokenizerFast` folder."""

import json
import sys
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.utils.hub import CHAT_TEMPLATE_FILE

from nvium_core.text.frame import set_frame
from nvium_core.training.data.corpus import END_OF_TEXT


def train_tokenizer(documents: Iterable[str], vocab_size: int, context: int) -> PreTrainedTokenizerFast:
    """Train a tokenizer that encodes any text without loss. Every encoding starts with end-of-text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=sys.stderr.isatty(),
    )
    tokenizer.train_from_iterator(documents, trainer)
    set_frame(tokenizer, tokenizer.encode(END_OF_TEXT).ids, [])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        model_max_length=context,
        clean_up_tokenization_spaces=False,
    )


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write tokenizer.json, and tokenizer_config.json with the chat template. Any `AutoTokenizer` can load them."""
    tokenizer.save_pretrained(folder)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokenizer.bos_token,
        "eos_token": tokenizer.eos_token,
        "model_max_length": tokenizer.model_max_length,
        "clean_up_tokenization_spaces": False,
    }
    if tokenizer.chat_template:
        config["chat_template"] = tokenizer.chat_template
        (folder / CHAT_TEMPLATE_FILE).unlink(missing_ok=True)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
