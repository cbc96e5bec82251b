"""`nvium retrofit`: check its settings, train exits for a base model, and measure them on held-out text."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError
from rich.console import Console
from transformers import PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from nvium_core.errors import DataError, TrainingError
from nvium_core.model.causal_lm import NviumForCausalLM
from nvium_core.model.checkpoint import read_config, resolve_folder
from nvium_core.model.config import NviumConfig
from nvium_core.model.gguf import open_gguf
from nvium_core.model.gguf import read_config as read_gguf_config
from nvium_core.model.source import describe_exits, digest_of, is_gguf
from nvium_core.options import RetrofitSettings
from nvium_core.training.caveats import warnings
from nvium_core.training.data.source import text_digest
from nvium_core.training.data.windows import PackedConversations
from nvium_core.training.initial import check_head
from nvium_core.training.loop import fast_dtype
from nvium_core.training.reports import follow, note
from nvium_core.training.retrofitting.model import WithExits, shift_to_depth
from nvium_core.training.retrofitting.run import STATE_FOLDER, Measured, RetrofitRun, measure
from nvium_core.training.retrofitting.texts import SelfTalk, TrainingText, document_numbers, read_text, write_self_talk
from nvium_core.training.run_folder import owned

MAX_CONTEXT = 1024


def retrofit(settings: RetrofitSettings, tokenizer: PreTrainedTokenizerFast) -> dict[str, Measured]:
    """Train exits, or resume the retrofit in the target folder. Return the exits' measures by kind of text.

    Raise `CheckpointError`, `DataError` or `TrainingError`.
    """
    path = Path(settings.source)
    source = path if is_gguf(path) else resolve_folder(path)
    config = checked_config(settings, source_config(source))
    check_target(settings.target)
    with owned(settings.target / STATE_FOLDER):
        run, texts = prepare_run(settings, source, config, tokenizer)
        run.resume()
        num_tokens = sum(len(each) for text in texts for each in text.training)
        note(f"{num_tokens:,} tokens of text, {run.num_steps:,} steps; starting with least squares")
        follow(run, Console(stderr=True))
        note(f"shifting routers to depth {settings.depth:g}, and measuring on held-out text")
        shift = shift_to_depth(run.model, run.stream, settings.depth)
        results = {}
        for text in texts:
            held_out = PackedConversations(text.held_out, tokenizer.eos_token_id, run.stream.context)
            results[text.kind] = measure(run.model, held_out, document_numbers(text.held_out)[-1] + 1)
        base = run.model.model
        about = {"model": settings.source, "training_tokens": base.config.training_tokens}
        for line in warnings(about | {"num_parameters": base.num_parameters()}):
            note(line)
        run.write(shift=shift, measured={kind: asdict(each) for kind, each in results.items()})
    return results


def check_target(target: Path) -> None:
    """Raise `TrainingError` if the folder has contents, but no retrofit to resume."""
    if target.exists() and not (target / STATE_FOLDER).is_dir() and (target.is_file() or any(target.iterdir())):
        raise TrainingError(f"{target}: not empty, and has no retrofit to resume; choose another folder")


def source_config(source: Path) -> NviumConfig:
    return read_gguf_config(open_gguf(source)) if is_gguf(source) else read_config(source)


def prepare_run(
    settings: RetrofitSettings, source: Path, config: NviumConfig, tokenizer: PreTrainedTokenizerFast
) -> tuple[RetrofitRun, list[TrainingText]]:
    torch.manual_seed(settings.seed)
    disable_progress_bar()
    if tokenizer.eos_token_id is None:
        raise DataError(f"{settings.source}: the tokenizer has no end-of-text token")
    base = NviumForCausalLM.from_pretrained(source)
    context = min(MAX_CONTEXT, config.max_position_embeddings)
    paths = list(files(settings, base, tokenizer))
    texts = [read_text(path, tokenizer, context, settings.tokens) for path in paths]
    examples = [each for text in texts for each in text.training]
    stream = PackedConversations(examples, tokenizer.eos_token_id, context, settings.seed)
    model = WithExits(base, config, fast_dtype(torch.device("cpu")))
    about = describe_exits(
        config,
        settings.source if not Path(settings.source).exists() else source.resolve().name,
        digest_of(base.state_dict(), base.config),
        licence=licence(source),
        text=[{"name": path.name, "sha256": text_digest(path)} for path in paths],
        settings={name: value for name, value in asdict(settings).items() if name not in ("source", "target", "data")},
    )
    return RetrofitRun(settings, model, stream, about), texts


def licence(source: Path) -> str | None:
    """Return the licence stated in the base's GGUF file or model card, or None."""
    if is_gguf(source):
        return open_gguf(source).fields.get("general.license")
    card = source / "README.md"
    stated = re.search(r"^license: *(\S+)", card.read_text(encoding="utf-8"), re.MULTILINE) if card.exists() else None
    return stated[1] if stated else None


def files(settings: RetrofitSettings, base: NviumForCausalLM, tokenizer: PreTrainedTokenizerFast) -> Iterator[Path]:
    """Yield the training files: `data`, and a file of conversations, which the model generates here."""
    if settings.data:
        yield settings.data
    if num_tokens := settings.self_talk_tokens:
        file = settings.target / STATE_FOLDER / "self_talk.jsonl"

        def report(num_written: int) -> None:
            note(f"{file}: {num_written:,} of {num_tokens:,} tokens")

        write_self_talk(partial(SelfTalk, base, tokenizer), file, num_tokens, report)
        yield file


def checked_config(settings: RetrofitSettings, config: NviumConfig) -> NviumConfig:
    """Return the base's configuration with exits. Raise `TrainingError` if the settings are invalid."""
    if config.num_loops > 1:
        raise TrainingError(f"{settings.source}: is a looped model, which cannot be retrofitted; pass a plain Llama")
    check_head(settings.source, config)
    if config.num_exits > 1 or config.adapter_hidden_size:
        raise TrainingError(f"{settings.source}: already has exits or an adapter; pass a plain Llama")
    if settings.data and not settings.data.exists():
        raise TrainingError(f"{settings.data}: no such file")
    added = with_exits(config, exit_layers(settings.exits, config.num_hidden_layers), 2 * config.hidden_size)
    added.default_sampling = "original"
    shallowest = (added.exit_layers or [])[0] / added.num_hidden_layers
    if not shallowest < settings.depth < 1:
        raise TrainingError(
            f"depth must be in ({shallowest:.3g}, 1), above the depth of the first exit, got {settings.depth}"
        )
    if settings.tokens < 1 or (settings.self_talk or 0) < 0:
        raise TrainingError("tokens must be at least 1, and self_talk must not be negative")
    if settings.exits_learn == "text" and not settings.data:
        raise TrainingError("exits_learn=text requires a text; pass --data")
    if not settings.data and not settings.self_talk_tokens:
        raise TrainingError("self_talk: must be at least 1 without --data")
    return added


def with_exits(config: NviumConfig, layers: Sequence[int], adapter_hidden_size: int | None = None) -> NviumConfig:
    """Add exits, with adapters as wide as the model by default. Raise `TrainingError` if the layers are invalid."""
    added = {"exit_layers": list(layers), "adapter_hidden_size": adapter_hidden_size}
    try:
        return NviumConfig.from_dict(config.to_dict() | added)
    except (ValueError, StrictDataclassError) as error:
        raise TrainingError(str(error.__cause__ or error)) from error


def exit_layers(text: str, num_layers: int) -> list[int]:
    """Parse a number of exits, or layers such as `12,18,24`. Raise `TrainingError` if the model cannot have them."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise TrainingError(f"exits must be a number, or layers such as 12,18,24; got {text!r}") from error
    if "," not in text:
        if not 2 <= numbers[0] <= num_layers:
            raise TrainingError(f"the number of exits must be in [2, {num_layers}], got {text}")
        return [round(number * num_layers / numbers[0]) for number in range(1, numbers[0] + 1)]
    if numbers != sorted(set(numbers)) or not 1 <= numbers[0] <= numbers[-1] <= num_layers:
        raise TrainingError(f"the layers of exits must be in [1, {num_layers}] and increase, got {text}")
    return numbers if numbers[-1] == num_layers else [*numbers, num_layers]
