"""The training loop: optimiser steps, evaluations, checkpoints and the export of the trained model.

A run's folder contains `tokenizer/`, `tokens.npy`, `state.pt`, `log.jsonl` and, when done, `model/`, a Hugging Face
folder. Under torchrun all processes train one model.
"""

import math
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from nvium_core.model.checkpoint import MODEL_FOLDER
from nvium_core.training.checkpoint import STATE, State, gather, gather_weights, read_state, scatter, write_state
from nvium_core.training.data.loader import prefetched
from nvium_core.training.data.source import prepare_text, validation_text
from nvium_core.training.data.tokens import differences
from nvium_core.training.data.windows import Batch, Windows
from nvium_core.training.distributed import Processes, gradient_sync, joined_processes, own_device, parallelize
from nvium_core.training.errors import TrainingError
from nvium_core.training.initial import initial_model, with_initial_shape
from nvium_core.training.objective.beta import VALIDATION_LOSS, beta_control
from nvium_core.training.objective.loss import nvium_objective
from nvium_core.training.objective.objective import Objective, ObjectiveFunction, Phase
from nvium_core.training.optimizer import optimizers
from nvium_core.training.options import RunOptions
from nvium_core.training.precision import fast_dtype
from nvium_core.training.recipes.parameters import numel
from nvium_core.training.recipes.recipe import Recipe
from nvium_core.training.reports import Report, RunLog, follow
from nvium_core.training.run_folder import owned, write_model, write_recipe

ENOUGH_TOKENS_PER_PARAMETER = 1.0
CHANGEABLE = {"total_tokens", "epochs", "checkpoint_every", "evaluations"}
"""Settings of a recipe that may change when a run resumes."""


@dataclass(frozen=True)
class Method:
    """How to build and train a model. `build` takes the recipe, the vocabulary size and the end-of-text token."""

    build: Callable[[Recipe, int, int], PreTrainedModel]
    objective: ObjectiveFunction


NVIUM = Method(initial_model, nvium_objective)
"""Trains an N-vium. A dense model is an N-vium with one exit and no adapter."""


def train(recipe: Recipe, options: RunOptions, method: Method = NVIUM) -> Path:
    """Train a recipe, resuming from the folder's checkpoint if there is one. Return the model's folder."""
    device = own_device(torch.device(options.device))
    with joined_processes(device) as processes, owned(options.folder) if processes.is_first else nullcontext():
        run = prepared(recipe, options, device, processes, method)
        run.resume()
        show(run)
        return run.export()


def prepared(
    recipe: Recipe, options: RunOptions, device: torch.device, processes: Processes, method: Method = NVIUM
) -> "TrainingRun":
    """Prepare the text and return a run at step 0."""
    recipe = with_initial_shape(recipe)
    check_options(recipe, options, processes)
    try:
        tokenizer, stream = prepare_text(recipe, options.data, options.folder, processes)
        recipe = recipe.with_text(stream.num_windows(recipe.short_context))
    except OSError as error:
        raise TrainingError(f"{options.folder}: cannot write or read the tokenized text ({error})") from error
    validation = None
    if options.validation:
        validation = validation_text(recipe, options.validation, tokenizer)
        if validation.num_windows(recipe.shape.context) < processes.count:
            least = processes.count * recipe.shape.context + 1
            raise TrainingError(f"{options.validation}: too short; must have at least {least} tokens")
    return TrainingRun(recipe, options, tokenizer, stream, validation, device, processes, method)


def check_options(recipe: Recipe, options: RunOptions, processes: Processes) -> None:
    """Raise `TrainingError` if the options contradict one another or the recipe."""
    try:
        for progress in (0.0, 1.0):
            processes.share(recipe.windows_of_a_step(progress))
    except ValueError as error:
        raise TrainingError(f"tokens_per_step: {error}") from error
    if recipe.beta.adaptive and options.validation is None:
        raise TrainingError("an adaptive β needs a validation text; pass --validation")
    beta_control(recipe.beta, recipe.num_steps, options.dense_log)
    if options.dense_log and not recipe.beta.adaptive:
        raise TrainingError("--dense-log requires --set beta.adaptive=true")
    if recipe.optimizer.muon_rate and options.sharding == "fsdp" and processes.count > 1:
        raise TrainingError("Muon does not support FSDP; pass --sharding ddp or --set optimizer.muon_rate=0")


def show(run: "TrainingRun") -> None:
    """Train to the end with a progress bar on the first process.

    Raise `KeyboardInterrupt` after SIGINT or SIGTERM, once a checkpoint is written.
    """
    console = Console(stderr=True, quiet=not run.processes.is_first)
    console.print(f"{run.epochs:.2f} epochs, {run.num_steps:,} steps", highlight=False)
    follow(run, console, run.processes.any)
    console.print(run.tokens_summary(), highlight=False)


class TrainingRun:
    """A run in progress: model, optimisers, β and the current step."""

    def __init__(
        self,
        recipe: Recipe,
        options: RunOptions,
        tokenizer: PreTrainedTokenizerBase,
        stream: Windows,
        validation: Windows | None = None,
        device: torch.device | None = None,
        processes: Processes | None = None,
        method: Method = NVIUM,
    ) -> None:
        torch.manual_seed(recipe.seed)
        self.recipe, self.options = recipe, options
        self.tokenizer, self.stream, self.validation = tokenizer, stream, validation
        self.device, self.processes = device or torch.device(options.device), processes or Processes()
        self.model = method.build(recipe, len(tokenizer), tokenizer.eos_token_id).train()
        nn.Module.to(self.model, self.device)
        if options.checkpoint_activations:
            self.model.activation_checkpointing_enable()
        function = torch.compile(method.objective, dynamic=False) if options.compile else method.objective
        objective = Objective(self.model, function)
        self.objective = parallelize(objective, self.model.model.layers, options.sharding, self.processes)
        self.optimizers = optimizers(self.model, recipe.learning_rate.maximum, recipe.optimizer)
        self.beta = beta_control(recipe.beta, recipe.num_steps, options.dense_log)
        self.autocast_dtype = fast_dtype(self.device)
        self.step = 0

    @property
    def num_steps(self) -> int:
        return self.recipe.num_steps

    @property
    def epochs(self) -> float:
        context = self.recipe.short_context
        return self.recipe.total_tokens / (self.stream.num_windows(context) * context)

    def tokens_summary(self) -> str:
        """Return a line about the tokens read. Warn if they are too few to compare models trained from scratch."""
        tokens = self.recipe.total_tokens
        ratio = tokens / numel(self.model)
        line = f"{tokens:,} tokens read, {ratio:.2g} per parameter"
        is_short = ratio < ENOUGH_TOKENS_PER_PARAMETER and self.recipe.initial is None
        return f"{line}. Warning: too few to compare models; the paper reads 20 per parameter" if is_short else line

    @property
    def progress(self) -> float:
        return self.step / self.num_steps

    def steps(self) -> Generator[Report, None, None]:
        """Train to the end, yielding a report after every step."""
        if self.processes.is_first:
            write_recipe(self.recipe, self.options.folder)
        log = RunLog(self.options.folder, self.step) if self.processes.is_first else None
        try:
            for batches in prefetched(map(self.batches_of, range(self.step, self.num_steps))):
                report = self.train_step(batches)
                if self.validation and self.is_evaluation_due:
                    report |= self.evaluate(self.validation)
                if log:
                    log.write(report)
                if self.step % self.recipe.checkpoint_every == 0:
                    self.save()
                yield report
        finally:
            if log:
                log.close()
        self.save()

    @property
    def is_evaluation_due(self) -> bool:
        """True if an evaluation follows this step. Evaluations are evenly spaced over the run."""
        parts, num_steps = self.recipe.evaluations, self.num_steps
        return self.step * parts // num_steps > (self.step - 1) * parts // num_steps

    def batches_of(self, step: int) -> list[Batch]:
        """Return this process's windows of a step, in batches of at most `rows_per_pass` tokens."""
        progress = step / self.num_steps
        context, num_windows = self.recipe.context_at(progress), self.recipe.windows_of_a_step(progress)
        own, per_pass = self.processes.share(num_windows), max(1, self.options.rows_per_pass // context)
        return [
            self.stream.batch(step * num_windows + first, min(per_pass, own.stop - first), context)
            for first in range(own.start, own.stop, per_pass)
        ]

    def train_step(self, batches: Sequence[Batch]) -> Report:
        """Take one optimiser step. Gradients are accumulated over the batches."""
        started = time.monotonic()
        phase = self.phase()
        metrics = self.accumulate(batches, phase)
        self.update(metrics["mix_loss"])
        if "mean_depth" in metrics and not self.recipe.router_warmup.active(phase.progress):
            self.beta.observe_depth(float(metrics["mean_depth"]))
        return {
            "step": self.step,
            **{name: rounded(value) for name, value in metrics.items()},
            "beta": round(float(phase.beta), 5),
            "tokens_per_second": round(self.recipe.tokens_per_step / (time.monotonic() - started)),
        }

    def phase(self) -> Phase:
        """Return this step's loss weights: only α during the router warm-up, and only β afterwards."""
        warmup = self.recipe.router_warmup
        alpha, beta = (warmup.alpha, 0.0) if warmup.active(self.progress) else (0.0, self.beta.beta)
        scalar = partial(torch.tensor, device=self.device)
        return Phase(self.step, self.progress, scalar(alpha), scalar(beta))

    def accumulate(self, batches: Sequence[Batch], phase: Phase) -> dict[str, Tensor]:
        """Accumulate gradients batch by batch. Return the metrics' means over all processes."""
        counts = [batch.counted.sum().to(self.device) for batch in batches]
        num_counted = self.processes.total(torch.stack(counts).sum()).clamp_min(1)
        metrics: dict[str, Tensor] = {}
        for number, (batch, count) in enumerate(zip(batches, counts, strict=True), 1):
            share = count / num_counted
            with gradient_sync(self.objective, enabled=number == len(batches)):
                with self.autocast():
                    result = self.objective(batch.to(self.device), phase)
                (share * self.processes.count * result.loss).backward()
            for name, value in result.metrics.items():
                metrics[name] = metrics.get(name, 0) + share * value
        return {name: self.processes.total(value) for name, value in metrics.items()}

    def autocast(self) -> torch.autocast:
        enabled = self.autocast_dtype is not torch.float32
        return torch.autocast(self.device.type, self.autocast_dtype, enabled=enabled)

    def update(self, mix_loss: Tensor) -> None:
        """Clip and apply the gradients. Raise `TrainingError` if the loss or a gradient is not finite."""
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.optimizer.clip_norm)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        if not bool(torch.isfinite(mix_loss) & torch.isfinite(norm)):
            raise TrainingError(f"the loss is not finite at step {self.step + 1}; the last checkpoint is intact")
        share = self.recipe.learning_rate.share_at((self.step + 1) / self.num_steps)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = share * group["maximum_lr"]
            optimizer.step()
        self.model.zero_grad(set_to_none=True)
        self.step += 1

    @torch.no_grad()
    def evaluate(self, validation: Windows) -> Report:
        """Compute the mean `mix_loss` over the validation text in windows of full context, and update β."""
        context = self.recipe.shape.context
        num_windows = validation.num_windows(context)
        own = self.processes.share(num_windows - num_windows % self.processes.count)
        self.model.eval()
        with self.autocast():
            sums = [self.loss_and_count(validation.batch(window, 1, context)) for window in own]
        self.model.train()
        total_loss, num_counted = self.processes.total(torch.stack(sums).sum(0)).tolist()
        loss = total_loss / max(1, num_counted)
        if not math.isfinite(loss):
            raise TrainingError(f"the validation loss is not finite at step {self.step}; the last checkpoint is intact")
        self.beta.observe_loss(self.step, loss)
        return {VALIDATION_LOSS: round(loss, 5)}

    def loss_and_count(self, batch: Batch) -> Tensor:
        """Return the sum of `mix_loss` over a batch's counted targets, and their number."""
        metrics: dict[str, Tensor] = self.objective(batch.to(self.device), self.phase()).metrics
        count = batch.counted.sum().to(self.device)
        return torch.stack([metrics["mix_loss"] * count, count])

    def save(self) -> None:
        state = gather(self.model, self.optimizers)
        if self.processes.is_first:
            own = {"recipe": asdict(self.recipe), "step": self.step, "beta": self.beta.state()}
            write_state(state | own, self.options.folder)
        self.processes.wait()

    def resume(self) -> None:
        """Continue from the checkpoint, if there is one."""
        state = read_state(self.options.folder)
        if state is None:
            return
        check_resumable(state, self.recipe, self.options.folder)
        self.step = state["step"]
        self.beta.restore(state["beta"])
        scatter(state, self.model, self.optimizers, self.processes)

    def export(self) -> Path:
        """Write the model as a Hugging Face folder in bfloat16."""
        folder = self.options.folder / MODEL_FOLDER
        weights = gather_weights(self.model)
        if self.processes.is_first:
            whole = type(self.model)(self.model.config)
            whole.load_state_dict(weights)
            whole.generation_config = self.model.generation_config
            write_model(nn.Module.to(whole, torch.bfloat16), self.tokenizer, folder)
        self.processes.wait()
        return folder


def check_resumable(state: State, recipe: Recipe, folder: Path) -> None:
    """Raise `TrainingError` if the recipe differs from the checkpoint's, or would change the schedule of past steps."""
    if others := differences(state["recipe"], asdict(recipe)) - CHANGEABLE:
        raise TrainingError(
            f"{folder / STATE}: the checkpoint's {', '.join(sorted(others))} differ from the recipe's; "
            "choose another --folder"
        )
    step, total_tokens = state["step"], state["recipe"]["total_tokens"]
    begun = replace(recipe, total_tokens=total_tokens)
    if begun.num_steps != recipe.num_steps and schedule_at(begun, step) != schedule_at(recipe, step):
        raise TrainingError(
            f"total_tokens cannot change after step {step}: the schedule of past steps depends on the total; "
            f"set total_tokens={total_tokens}, or choose another --folder"
        )


def schedule_at(recipe: Recipe, step: int) -> tuple[float, int, bool]:
    """Return a step's learning rate as a share of the maximum, its window length, and whether routers warm up."""
    progress = step / recipe.num_steps
    return (
        round(recipe.learning_rate.share_at(progress), 9),
        recipe.context_at(progress),
        recipe.router_warmup.active(progress),
    )


def rounded(value: Tensor) -> float | list[float]:
    """Round a metric to four decimals; a vector becomes a list."""
    numbers: float | list[float] = value.tolist()
    return [round(number, 4) for number in numbers] if isinstance(numbers, list) else round(numbers, 4)
