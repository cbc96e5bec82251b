"""`nvium retrofit`: from a model that exists and a text to the same model with exits, checked, resumable, measured."""

from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from nvium_core.model.checkpoint import read_config, resolve_folder
from nvium_core.model.config import NviumConfig
from nvium_core.model.gguf import open_gguf
from nvium_core.model.gguf import read_config as read_gguf_config
from nvium_core.model.nvium import NviumForCausalLM
from nvium_core.model.source import is_gguf
from nvium_core.training.data.corpus import is_corpus, stream_documents
from nvium_core.training.data.documents import DataError, read_documents
from nvium_core.training.data.tokens import encoded
from nvium_core.training.data.windows import PackedStream, Tokens
from nvium_core.training.precision import fast_dtype
from nvium_core.training.retrofitting.folder import STATE_FOLDER, check_target, write_result
from nvium_core.training.retrofitting.model import FrozenWithExits
from nvium_core.training.retrofitting.run import RetrofitRun, described, show
from nvium_core.training.retrofitting.settings import RetrofitSettings
from nvium_core.training.retrofitting.table import Measured, measured
from nvium_core.training.run_folder import owned

MAX_CONTEXT, MIN_CONTEXT = 1024, 8
MAX_HELD_OUT, HELD_OUT_SHARE = 8_192, 0.1
"""Of the text, to measure on and not to learn from."""


def retrofit(settings: RetrofitSettings, tokenizer: PreTrainedTokenizerFast) -> Measured:
    """With the source's tokenizer; a target that holds a part of the same retrofit is gone on with.

    Raises `CheckpointError`, `RetrofitError` or `DataError` before anything is tokenised, and `TrainingError`.
    """
    path = Path(settings.source)
    source = path if is_gguf(path) else resolve_folder(path)
    config = settings.check(source_config(source))
    check_target(settings.target)
    with owned(settings.target / STATE_FOLDER):
        run, held_out = prepared(settings, source, config, tokenizer)
        run.resume()
        show(run)
        found = measured(run.model, held_out, run.context)
        write_result(described(settings) | {"measured": found.as_dict()}, settings.target)
    return found


def source_config(source: Path) -> NviumConfig:
    return read_gguf_config(open_gguf(source)) if is_gguf(source) else read_config(source)


def prepared(
    settings: RetrofitSettings, source: Path, config: NviumConfig, tokenizer: PreTrainedTokenizerFast
) -> tuple[RetrofitRun, PackedStream]:
    """The run at its beginning, and the text that it is measured on."""
    torch.manual_seed(settings.seed)
    disable_progress_bar()
    original = NviumForCausalLM.from_pretrained(source)
    tokens, held_out = split(read_tokens(settings, tokenizer), settings.data)
    context = min(MAX_CONTEXT, config.max_position_embeddings, len(held_out) - 1)
    end = tokenizer.eos_token_id
    model = FrozenWithExits(original, config, fast_dtype(torch.device("cpu")))
    run = RetrofitRun(settings, model, tokenizer, PackedStream(tokens, end, settings.seed), context)
    return run, PackedStream(held_out, end)


def read_tokens(settings: RetrofitSettings, tokenizer: PreTrainedTokenizerFast) -> Tokens:
    """As many as are learnt from, and those to measure on, or all there are."""
    if tokenizer.eos_token_id is None:
        raise DataError(f"{settings.source}: its tokenizer has no end-of-text, which stands between documents")
    documents = stream_documents(settings.data) if is_corpus(settings.data) else read_documents(settings.data)
    return np.concatenate(list(encoded(documents, tokenizer, settings.tokens + MAX_HELD_OUT)))


def split(tokens: Tokens, data: Path) -> tuple[Tokens, Tokens]:
    """What is learnt from, and the end of the text, which is not."""
    num_held_out = min(MAX_HELD_OUT + 1, int(HELD_OUT_SHARE * len(tokens)))
    if num_held_out <= MIN_CONTEXT:
        raise DataError(f"{data}: {len(tokens)} tokens of text are too few")
    return tokens[:-num_held_out], tokens[-num_held_out:]
