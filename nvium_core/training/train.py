"""Training runs: text, model, evaluations, the export of the trained model, and the comparison of seeds.

A run's folder contains `tokenizer/`, `tokens.npy`, `state.pt`, `log.jsonl` and, when done, `model/`, a Hugging Face
folder.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import PreTrainedTokenizerBase

from nvium_core.errors import TrainingError
from nvium_core.model.checkpoint import MODEL_FOLDER, RECIPE_FILE
from nvium_core.options import RunOptions
from nvium_core.training.caveats import MAX_SHARE, too_few_tokens, warnings
from nvium_core.training.data.source import prepare_text, validation_text
from nvium_core.training.data.windows import Windows
from nvium_core.training.initial import built_model, imported, with_initial_shape
from nvium_core.training.loggers import Report, module_of, read_log
from nvium_core.training.loop import TrainingLoop, fast_dtype
from nvium_core.training.objective import nvium_objective
from nvium_core.training.optimizer import BetaControl, optimizers
from nvium_core.training.recipes.recipe import Recipe
from nvium_core.training.reports import follow, note
from nvium_core.training.run_folder import State, owned, write_model

SAMPLE_TOKENS = 50
COLLAPSED_STEPS = 10  # consecutive ones before the warning
VALIDATION_LOSS = "validation_loss"  # field of log.jsonl: L_mix on the validation text
FIGURES = {VALIDATION_LOSS: "validation loss", "mix_loss": "loss", "mean_depth": "mean depth", "beta": "β"}
END_SHARE = 0.1  # share of the steps, at the end of the run, over which a figure is averaged


def train(recipe: Recipe, options: RunOptions) -> Path:
    """Train a recipe, resuming from the folder's checkpoint if there is one. Return the model's folder."""
    return trained(recipe, options).folder / MODEL_FOLDER


def trained(recipe: Recipe, options: RunOptions) -> "TrainingRun":
    """Train a recipe like `train`. Return the run after writing its model."""
    with owned(options.folder):
        run = prepare_run(recipe, options)
        run.resume()
        show(run)
        run.export()
        return run


def prepare_run(recipe: Recipe, options: RunOptions) -> "TrainingRun":
    """Prepare the text and return a run at step 0.

    Raise `TrainingError` if a logger, model or objective cannot be imported.
    """
    recipe = with_initial_shape(recipe)
    for logger in options.loggers:
        module_of(logger)
    for name in filter(None, (recipe.model, recipe.objective)):
        imported(name)
    try:
        tokenizer, stream = prepare_text(recipe, options.data, options.folder)
    except OSError as error:
        raise TrainingError(f"{options.folder}: cannot write or read the tokenized text ({error})") from error
    validation = validation_text(recipe, options.validation, tokenizer) if options.validation else None
    return TrainingRun(recipe, options, tokenizer, stream, validation)


def show(run: "TrainingRun") -> None:
    """Train to the end with a progress bar.

    Raise `KeyboardInterrupt` after SIGINT or SIGTERM, once a checkpoint is written.
    """
    note(f"{run.epochs:.2f} epochs, {run.num_steps:,} steps")
    if run.options.compile:
        note("compiling: the first step takes about a minute; --no-compile skips this")
    follow(run, Console(stderr=True))
    note(run.tokens_summary())


class TrainingRun(TrainingLoop):
    changeable = frozenset({"total_tokens", "checkpoint_every", "evaluations"})

    def __init__(
        self,
        recipe: Recipe,
        options: RunOptions,
        tokenizer: PreTrainedTokenizerBase,
        stream: Windows,
        validation: Windows | None = None,
    ) -> None:
        torch.manual_seed(recipe.seed)
        self.options, self.tokenizer, self.validation = options, tokenizer, validation
        self.num_collapsed = 0
        self.model = built_model(recipe, len(tokenizer), tokenizer.eos_token_id).train()
        nn.Module.to(self.model, torch.device(options.device))
        function = imported(recipe.objective) if recipe.objective else nvium_objective
        objective = torch.compile(function, dynamic=False) if options.compile else function
        super().__init__(
            recipe=recipe,
            folder=options.folder,
            stream=stream,
            checkpointed=self.model,
            objective=partial(objective, self.model),
            optimizers=optimizers(self.model, recipe.learning_rate.maximum, recipe.optimizer),
            clipped=[list(self.model.parameters())],
            beta=BetaControl(recipe.beta.initial, recipe.beta.depth),
            rows_per_pass=options.rows_per_pass,
            autocast_dtype=fast_dtype(self.model.device),
            loggers=options.loggers,
        )

    @property
    def epochs(self) -> float:
        return self.recipe.total_tokens / (self.stream.num_windows * self.stream.context)

    @property
    def size(self) -> dict[str, Any]:
        """The number of parameters, and of tokens that this and the initial model's runs have read, None if unknown."""
        before = self.model.config.training_tokens if self.recipe.initial else 0
        total = None if before is None else before + self.recipe.total_tokens
        return {"training_tokens": total, "num_parameters": self.model.num_parameters()}

    def tokens_summary(self) -> str:
        """Return a line about the tokens read. Warn if they are too few to compare models."""
        tokens, few = self.recipe.total_tokens, too_few_tokens(**self.size)
        ratio = f", {tokens / self.model.num_parameters():.2g} per parameter"
        return f"{tokens:,} tokens read" + (f". Warning: {few}" if few else ratio)

    def begin(self) -> None:
        """Write recipe.json for users and evaluations. A resumed run reads the recipe from the checkpoint instead."""
        text = json.dumps(asdict(self.recipe), indent=2) + "\n"
        (self.folder / RECIPE_FILE).write_text(text, encoding="utf-8")

    def evaluation(self) -> Report:
        report = self.evaluate(self.validation) if self.validation and self.is_evaluation_due else {}
        if self.step % self.tenth == 0:
            report["sample"] = self.sample()
        return report

    @torch.no_grad()
    def sample(self) -> str:
        """Generate the beginning of a text, without changing the state of the random number generators."""
        start_BT = torch.tensor([[self.tokenizer.eos_token_id]], device=self.device)
        self.model.eval()
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []), self.autocast():
            torch.manual_seed(self.step)
            ids_BT = self.model.generate(
                start_BT,
                attention_mask=torch.ones_like(start_BT),
                do_sample=True,
                max_new_tokens=min(SAMPLE_TOKENS, self.recipe.shape.context - 1),
                pad_token_id=self.tokenizer.eos_token_id,
            )
        self.model.train()
        return str(self.tokenizer.decode(ids_BT[0], skip_special_tokens=True))

    @property
    def is_evaluation_due(self) -> bool:
        parts, num_steps = self.recipe.evaluations, self.num_steps
        return self.step * parts // num_steps > (self.step - 1) * parts // num_steps

    def advice(self, report: Report) -> str:
        """Return a warning if one exit has had nearly all tokens in the last `COLLAPSED_STEPS` steps.

        The other exits then hardly learn any more. Steps of the router warm-up do not count.
        """
        shares, warmup = report.get("exit_probs", []), self.recipe.router_warmup
        is_collapsed = len(shares) > 1 and max(shares) > MAX_SHARE
        is_warm = not warmup.active(report["step"], self.recipe.num_steps)
        self.num_collapsed = self.num_collapsed + 1 if is_collapsed and is_warm else 0
        if self.num_collapsed != COLLAPSED_STEPS:
            return ""
        exit_ = shares.index(max(shares)) + 1
        change = "raise" if exit_ == len(shares) else "lower"
        return (
            f"Warning: for {COLLAPSED_STEPS} steps, over {MAX_SHARE:.0%} of the tokens have left at exit {exit_}, so "
            f"the others hardly learn. Start again in another folder: {change} β (beta.initial="
            f"{self.recipe.beta.initial:g}) or lengthen the router warm-up (router_warmup.share={warmup.share:g}, "
            f"min_steps={warmup.min_steps})"
        )

    @torch.no_grad()
    def evaluate(self, validation: Windows) -> Report:
        """Compute the mean `mix_loss` over the validation text in windows of full context."""
        sums = torch.zeros(2, device=self.device)  # of losses and of counted targets
        self.model.eval()
        for window in range(validation.num_windows):
            batch = validation.batch(window, 1).to(self.device)
            with self.autocast():
                metrics = self.objective(batch, self.phase()).metrics
            sums += batch.counted.sum() * torch.stack([metrics["mix_loss"], sums.new_ones(())])
        self.model.train()
        total_loss, num_counted = sums.tolist()
        loss = total_loss / max(1, num_counted)
        if not math.isfinite(loss):
            raise TrainingError(f"the validation loss is not finite at step {self.step}; the last checkpoint is intact")
        return {VALIDATION_LOSS: round(loss, 5)}

    def check_resumable(self, state: State) -> None:
        """Raise `TrainingError` if the recipe is not the checkpoint's, or would change the schedule of past steps."""
        super().check_resumable(state)
        step, total_tokens = state["step"], state["recipe"]["total_tokens"]
        begun = replace(self.recipe, total_tokens=total_tokens)
        if schedule_at(begun, step) != schedule_at(self.recipe, step):
            raise TrainingError(
                f"total_tokens cannot change after step {step}: the schedule of past steps depends on the total; "
                f"set total_tokens={total_tokens}, or choose another --folder"
            )

    def export(self) -> Path:
        """Write the model as a Hugging Face folder in bfloat16."""
        folder = self.folder / MODEL_FOLDER
        exported = built_model(self.recipe, len(self.tokenizer), self.tokenizer.eos_token_id)
        exported.load_state_dict(self.model.state_dict())
        exported.generation_config = self.model.generation_config
        exported.config.training_tokens = self.size["training_tokens"]
        write_model(nn.Module.to(exported, torch.bfloat16), self.tokenizer, folder)
        return folder


def schedule_at(recipe: Recipe, step: int) -> tuple[float, bool]:
    progress = step / recipe.num_steps
    is_warmup = recipe.router_warmup.active(step, recipe.num_steps)
    return round(recipe.learning_rate.share_at(progress), 9), is_warmup


Figures = dict[str, float]


def train_seeds(recipes: Mapping[int, Recipe], options: RunOptions) -> Table:
    """Train a recipe per seed, each in its own folder, FOLDER/seed-N.

    Return a table of the runs' last figures, and of their means with the standard deviations.
    """
    found, lines = dict[int, Figures](), list[str]()
    for seed, recipe in recipes.items():
        folder = options.folder / f"seed-{seed}"
        note(f"seed {seed}: {folder}")
        run = trained(recipe, replace(options, folder=folder))
        reports = read_log(folder)
        found[seed] = last_figures(reports)
        lines += warnings({"model": folder.name, "exit_shares": reports[-1].get("exit_probs"), **run.size})
    names = [name for name in FIGURES if all(name in figures for figures in found.values())]
    headings = (FIGURES[name] for name in names)
    table = Table("seed", *headings, box=SIMPLE, padding=(0, 1, 0, 0), caption="\n".join(lines))
    for seed, figures in found.items():
        table.add_row(str(seed), *(f"{figures[name]:.4f}" for name in names))
    values = [[figures[name] for figures in found.values()] for name in names]
    table.add_row("mean ± std", *(f"{fmean(each):.4f} ± {stdev(each):.4f}" for each in values if len(each) > 1))
    return table


def last_figures(reports: Sequence[Report]) -> Figures:
    """Return the last validation loss, if any, and the means of other figures over the last tenth of the steps."""
    end = reports[-max(1, round(END_SHARE * len(reports))) :]
    found = {name: fmean(report[name] for report in end) for name in FIGURES if all(name in report for report in end)}
    evaluated = [report[VALIDATION_LOSS] for report in reports if VALIDATION_LOSS in report]
    return found | ({VALIDATION_LOSS: evaluated[-1]} if evaluated else {})
