"""The training loop: steps until the tokens are spent, a resumable checkpoint now and then, a model at the end.

A run lives in one folder: `tokenizer/`, `tokens.npy`, `state.pt` (weights, optimiser, step), `log.jsonl` and, when
done, `model/`, a standard Hugging Face folder.
"""

import hashlib
import json
import pickle
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import GENERATION_CONFIG_NAME

from nvium_core.errors import NviumError
from nvium_core.model.nvium import NviumForCausalLM
from nvium_core.training.beta import beta_control
from nvium_core.training.data import Batch, DataError, PackedStream, encode, read_documents
from nvium_core.training.loss import Losses, batch_losses, objective
from nvium_core.training.optimizer import optimizers
from nvium_core.training.precision import fast_dtype
from nvium_core.training.recipes.recipe import Recipe
from nvium_core.training.tokenizer import save_tokenizer, train_tokenizer

EXTENDABLE = {"total_tokens", "checkpoint_every"}
"""What may change when a run is resumed."""


class TrainingError(NviumError, RuntimeError):
    """Training cannot go on; the last checkpoint is intact."""


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What a recipe reads, and where and how it is run."""

    data: Path
    folder: Path
    device: str = "cpu"
    compile: bool = False
    rows_per_pass: int = 16_384


def train(recipe: Recipe, options: RunOptions) -> Path:
    """Run a recipe to its end, from its last checkpoint if the folder holds one; returns the model's folder."""
    try:
        options.folder.mkdir(parents=True, exist_ok=True)
        tokenizer, stream = prepare_text(recipe, options)
    except OSError as error:
        raise TrainingError(f"{options.folder}: cannot be written ({error})") from error
    run = TrainingRun(recipe, options, stream, vocab_size=len(tokenizer))
    run.resume()
    with progress_bar() as progress:
        bar = progress.add_task("", total=recipe.num_steps, completed=run.step)
        for report in run.steps():
            progress.update(bar, completed=run.step, description=describe(report))
    return run.export(tokenizer)


def prepare_text(recipe: Recipe, options: RunOptions) -> tuple[PreTrainedTokenizerBase, PackedStream]:
    """The tokenizer and the token stream, from the folder if an earlier start left them there."""
    tokenizer_folder, tokens_file = options.folder / "tokenizer", options.folder / "tokens.npy"
    origin_file, origin = options.folder / "text.json", text_origin(recipe, options.data)
    if tokens_file.exists():
        check_origin(origin_file, origin)
    else:
        documents = read_documents(options.data)
        shape = recipe.shape
        save_tokenizer(train_tokenizer(documents, shape.vocab_size, shape.context), tokenizer_folder)
        tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
        partial = tokens_file.with_name("tokens.partial.npy")
        np.save(partial, encode(recipe.diet.readings(documents, recipe.seed), tokenizer))
        origin_file.write_text(json.dumps(origin, indent=2) + "\n", encoding="utf-8")
        partial.replace(tokens_file)
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    try:
        tokens = np.load(tokens_file)
    except (ValueError, EOFError) as error:
        raise TrainingError(f"{tokens_file}: damaged ({error}); delete it to begin again") from error
    return tokenizer, PackedStream(tokens, tokenizer.eos_token_id, recipe.seed)


def text_origin(recipe: Recipe, data: Path) -> dict[str, Any]:
    """All that the tokens of a run depend on."""
    try:
        with data.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"{data}: {error.strerror}") from error
    shape = recipe.shape
    return {
        "data": digest,
        "vocab_size": shape.vocab_size,
        "context": shape.context,
        "diet": asdict(recipe.diet),
        "seed": recipe.seed,
    }


def check_origin(path: Path, origin: dict[str, Any]) -> None:
    """Refuse to go on with tokens that were made of something else."""
    try:
        others = differences(json.loads(path.read_text(encoding="utf-8")), origin)
    except (OSError, ValueError) as error:
        raise TrainingError(f"{path}: {error}; delete tokens.npy beside it to begin again") from error
    if others:
        raise TrainingError(
            f"{path.parent}: holds tokens of other {', '.join(sorted(others))}; choose another --folder"
        )


class TrainingRun:
    """The state of a run: model, optimiser, β and the step reached."""

    def __init__(self, recipe: Recipe, options: RunOptions, stream: PackedStream, vocab_size: int) -> None:
        torch.manual_seed(recipe.seed)
        self.recipe, self.options, self.stream = recipe, options, stream
        self.model = NviumForCausalLM(recipe.shape.config(vocab_size, stream.end_token))
        nn.Module.to(self.model, torch.device(options.device))
        self.optimizers = optimizers(self.model, recipe.learning_rate.maximum, recipe.optimizer)
        self.beta = beta_control(recipe.beta)
        self.autocast_dtype = fast_dtype(torch.device(options.device))
        self.losses = torch.compile(batch_losses, dynamic=False) if options.compile else batch_losses
        self.step = 0

    @property
    def progress(self) -> float:
        return self.step / self.recipe.num_steps

    def steps(self) -> Iterator[dict[str, Any]]:
        """Train to the end; yields a report after every step."""
        with self.open_log() as log:
            while self.step < self.recipe.num_steps:
                report = self.train_step()
                log.write(json.dumps(report) + "\n")
                log.flush()
                if self.step % self.recipe.checkpoint_every == 0:
                    self.save()
                yield report
        self.save()

    def open_log(self) -> TextIO:
        """The log, less what an interrupted run wrote after its last checkpoint."""
        path = self.options.folder / "log.jsonl"
        kept = path.read_text(encoding="utf-8").splitlines(keepends=True)[: self.step] if path.exists() else []
        log = path.open("w", encoding="utf-8")
        log.writelines(kept)
        return log

    def train_step(self) -> dict[str, Any]:
        """One optimiser step over `tokens_per_step` tokens, in passes that fit in memory; reports what happened."""
        started = time.monotonic()
        warming_up = self.recipe.router_warmup.active(self.progress)
        alpha = self.recipe.router_warmup.alpha if warming_up else 0.0
        beta = 0.0 if warming_up else self.beta.beta
        means = self.accumulate(alpha, beta)
        self.update(means.mix)
        if not warming_up:
            self.beta.observe_depth(float(means.compute))
        return {
            "step": self.step,
            "mix_loss": round(float(means.mix), 4),
            "mean_depth": round(float(means.compute), 4),
            "beta": round(beta, 5),
            "exit_probs": [round(p, 4) for p in means.exit_probs.tolist()],
            "tokens_per_second": round(self.recipe.tokens_per_step / (time.monotonic() - started)),
        }

    def accumulate(self, alpha: float, beta: float) -> Losses:
        """The gradients of this step's tokens, pass by pass; returns the losses' means over all of them."""
        batches = list(self.batches())
        num_windows = sum(len(batch.inputs) for batch in batches)
        parts = []
        for batch in batches:
            share = len(batch.inputs) / num_windows
            with self.autocast():
                losses = self.losses(self.model, batch)
            (share * objective(losses, alpha, beta)).backward()
            parts.append(losses.detached(share))
        return Losses(*(torch.stack(values).sum(0) for values in zip(*parts, strict=True)))

    def autocast(self) -> AbstractContextManager[Any]:
        device = torch.device(self.options.device).type
        return nullcontext() if self.autocast_dtype is torch.float32 else torch.autocast(device, self.autocast_dtype)

    def batches(self) -> Iterator[Batch]:
        """This step's packed windows, at most `rows_per_pass` tokens at a time."""
        context = self.recipe.context_at(self.progress)
        windows = max(1, self.recipe.tokens_per_step // context)
        per_pass = max(1, min(windows, self.options.rows_per_pass // context))
        for first in range(0, windows, per_pass):
            batch = self.stream.batch(self.step * windows + first, min(per_pass, windows - first), context)
            yield batch.to(self.options.device)

    def update(self, mix_loss: Tensor) -> None:
        """Clip, check and take the optimiser's step."""
        grad_norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.optimizer.clip_norm)
        if not bool(torch.isfinite(mix_loss) & torch.isfinite(grad_norm)):
            raise TrainingError(f"the loss is not finite at step {self.step + 1}; the last checkpoint is intact")
        share = self.recipe.learning_rate.share_at((self.step + 1) / self.recipe.num_steps)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = share * group["maximum_lr"]
            optimizer.step()
        self.model.zero_grad(set_to_none=True)
        self.step += 1

    def save(self) -> None:
        """Write `state.pt` whole or not at all."""
        state = {
            "recipe": asdict(self.recipe),
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "beta": self.beta.state(),
        }
        path = self.options.folder / "state.pt"
        partial = path.with_suffix(".partial")
        try:
            torch.save(state, partial)
            partial.replace(path)
        except (OSError, RuntimeError) as error:
            raise TrainingError(f"{partial}: cannot write the checkpoint ({error}); the last one is intact") from error

    def resume(self) -> None:
        """Go on from `state.pt`, if there is one."""
        path = self.options.folder / "state.pt"
        if not path.exists():
            return
        try:
            state = torch.load(path, map_location=self.options.device, weights_only=True)
        except (OSError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
            raise TrainingError(f"{path}: damaged ({error!r})") from error
        if others := differences(state["recipe"], asdict(self.recipe)) - EXTENDABLE:
            raise TrainingError(f"{path}: holds a run with other {', '.join(sorted(others))}; choose another --folder")
        self.step = state["step"]
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.beta.restore(state["beta"])

    def export(self, tokenizer: PreTrainedTokenizerBase) -> Path:
        """Write the model as a standard folder, weights in bfloat16."""
        folder = self.options.folder / "model"
        nn.Module.to(self.model, torch.bfloat16)
        self.model.save_pretrained(folder)
        (folder / GENERATION_CONFIG_NAME).unlink(missing_ok=True)  # it says nothing that config.json does not
        save_tokenizer(tokenizer, folder)
        return folder


def differences(one: dict[str, Any], other: dict[str, Any], prefix: str = "") -> set[str]:
    """The dotted keys at which two recipes differ."""
    found = set[str]()
    for key in sorted(one.keys() | other.keys()):
        ours, theirs = one.get(key), other.get(key)
        if isinstance(ours, dict) and isinstance(theirs, dict):
            found |= differences(ours, theirs, f"{prefix}{key}.")
        elif ours != theirs:
            found.add(prefix + key)
    return found


def progress_bar() -> Progress:
    return Progress(
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.description}"),
        TimeRemainingColumn(elapsed_when_finished=True),
        console=Console(stderr=True),
    )


def describe(report: dict[str, Any]) -> str:
    """One line: loss, tokens/s, mean depth, β and the exits' shares."""
    shares = " ".join(f"{p:.2f}"[1:] if p < 1 else "1." for p in report["exit_probs"])
    return (
        f"loss {report['mix_loss']:.3f} · {report['tokens_per_second']:,} tok/s · depth {report['mean_depth']:.2f}"
        f" · β {report['beta']:.3f} · exits {shares}"
    )
