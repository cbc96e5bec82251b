"""`nvium retrofit`: from a model that exists and a text to the same model with exits, checked, resumable, measured."""

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from transformers import PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from nvium_core.model.checkpoint import read_config, resolve_folder
from nvium_core.model.config import NviumConfig
from nvium_core.model.gguf import open_gguf
from nvium_core.model.gguf import read_config as read_gguf_config
from nvium_core.model.nvium import NviumForCausalLM
from nvium_core.model.source import is_gguf
from nvium_core.training.chat.examples import Example
from nvium_core.training.chat.packing import PackedConversations
from nvium_core.training.data.documents import DataError
from nvium_core.training.data.tokens import text_digest
from nvium_core.training.precision import fast_dtype
from nvium_core.training.retrofitting.folder import STATE_FOLDER, check_target, write_in_place, write_result
from nvium_core.training.retrofitting.model import WithExits
from nvium_core.training.retrofitting.run import RetrofitRun, described, show
from nvium_core.training.retrofitting.self_talk import SelfTalk, write_self_talk
from nvium_core.training.retrofitting.settings import RetrofitSettings
from nvium_core.training.retrofitting.steering import steer
from nvium_core.training.retrofitting.table import Measured, measured
from nvium_core.training.retrofitting.texts import Text, read_text
from nvium_core.training.run_folder import owned

MAX_CONTEXT = 1024
SELF_TALK = "self_talk.jsonl"


def retrofit(
    settings: RetrofitSettings, tokenizer: PreTrainedTokenizerFast, *, accept_changes: bool = False
) -> dict[str, Measured]:
    """What has come of it, by kind of text. With the source's tokenizer; a target that holds a part of the same
    retrofit is gone on with, on another machine only if changes are accepted.

    Raises `CheckpointError`, `RetrofitError` or `DataError` before anything is tokenised, and `TrainingError`.
    """
    path = Path(settings.source)
    source = path if is_gguf(path) else resolve_folder(path)
    config = settings.check(source_config(source))
    check_target(settings.target)
    seconds = Laps()
    with owned(settings.target / STATE_FOLDER):
        run, texts = prepared(settings, source, config, tokenizer)
        run.resume(accept_changes=accept_changes)
        seconds.lap("text")
        num_tokens = sum(len(each) for text in texts for each in text.learnt)
        tell(f"{num_tokens:,} tokens of text, {run.num_steps:,} steps; least squares come first")
        show(run)
        seconds.lap("training")
        tell(f"leading routers to depth {settings.depth:g}, and measuring on text that was held out")
        shift = steer(run.model, run.stream, run.context, settings.depth)
        write_in_place(run.model.as_stored(), tokenizer, settings.target)
        found = {text.kind: measured(run.model, windows(text.held_out, tokenizer), run.context) for text in texts}
        seconds.lap("measuring")
        found_by_kind = {kind: each.as_dict() for kind, each in found.items()}
        result = {"shift": shift, "seconds": seconds.by_lap, "measured": found_by_kind}
        write_result(described(settings) | result, settings.target)
    return found


class Laps:
    """Seconds of the parts of a command, in this process: a run that was interrupted has had others before."""

    def __init__(self) -> None:
        self.by_lap = dict[str, float]()
        self._began = time.monotonic()

    def lap(self, name: str) -> None:
        """What was done since the last one has this name."""
        now = time.monotonic()
        self.by_lap[name], self._began = now - self._began, now


def source_config(source: Path) -> NviumConfig:
    return read_gguf_config(open_gguf(source)) if is_gguf(source) else read_config(source)


def prepared(
    settings: RetrofitSettings, source: Path, config: NviumConfig, tokenizer: PreTrainedTokenizerFast
) -> tuple[RetrofitRun, list[Text]]:
    """The run at its beginning, and its texts."""
    torch.manual_seed(settings.seed)
    disable_progress_bar()
    if tokenizer.eos_token_id is None:
        raise DataError(f"{settings.source}: its tokenizer has no end-of-text")
    original = NviumForCausalLM.from_pretrained(source)
    context = min(MAX_CONTEXT, config.max_position_embeddings)
    paths = list(files(settings, original, tokenizer))
    texts = [read_text(path, tokenizer, context, settings.tokens) for path in paths]
    stream = windows([each for text in texts for each in text.learnt], tokenizer, settings.seed)
    model = WithExits(original, config, fast_dtype(torch.device("cpu")), settings.updates_rank)
    digests = {"text": [text_digest(path) for path in paths], "weights": weights_digests(source)}
    return RetrofitRun(settings, model, tokenizer, stream, context, digests), texts


def weights_digests(source: Path) -> list[str]:
    """Of a model's files."""
    return [text_digest(file) for file in (sorted(source.glob("*.safetensors")) if source.is_dir() else [source])]


def files(settings: RetrofitSettings, original: NviumForCausalLM, tokenizer: PreTrainedTokenizerFast) -> Iterator[Path]:
    """Of the text that was given, and of what the model says to itself, which is written first."""
    if settings.data:
        yield settings.data
    if num_tokens := settings.self_talk_tokens:
        file = settings.target / STATE_FOLDER / SELF_TALK

        def sampled(number: int) -> None:
            tell(f"{number:,} tokens sampled for more conversations")

        def written(number: int) -> None:
            tell(f"{file}: {number:,} of {num_tokens:,} tokens")

        write_self_talk(partial(SelfTalk, original, tokenizer, sampled), file, num_tokens, written)
        yield file


def tell(line: str) -> None:
    """Progress, on standard error."""
    Console(stderr=True).print(line, highlight=False, markup=False, soft_wrap=True)


def windows(examples: list[Example], tokenizer: PreTrainedTokenizerFast, seed: int = 0) -> PackedConversations:
    return PackedConversations(examples, tokenizer.eos_token_id, seed)
