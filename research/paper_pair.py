"""Train an N-vium and its dense twin side by side until a time is up, and compare their perplexity.

    python -m research.paper_pair --data train.txt.xz --validation valid.txt.xz --minutes 9 --out pair

Both models read the same windows in the same order. They take turns of `--turn` steps, so that they have always taken
nearly the same number of steps. After every turn, the length of the run is set to what the time allows, up to the
recipe's: warm-ups of the learning rate and of the routers, β's steering and the decay over the last fifth follow from
it. The time includes tokenizing and compiling, which run at the same time, but not the evaluation at the end.

The machine needs this repository, PyTorch, both texts, and no network: the tokenizer is trained there. OUT gets
`parts/`, the last turn's weights in bfloat16 in at most seven files below 16 MiB, and, at the end, `pair.json`. The
same command continues an interrupted run. To continue on another machine, copy `parts/` to its OUT; the optimisers'
moments then start at zero. If a model cannot be compiled, both train eagerly. `--tiny` trains two small models.
"""

import io
import json
import shutil
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from nvium_core.bench.figures import write_json
from nvium_core.choices import Device
from nvium_core.errors import TrainingError
from nvium_core.evaluation.perplexity import evaluate
from nvium_core.evaluation.suite import description, perplexity_gain, twin_figures
from nvium_core.loading import load_model
from nvium_core.options import RunOptions
from nvium_core.training.caveats import warnings
from nvium_core.training.data.source import ORIGIN, TOKENS, prepare_text
from nvium_core.training.data.texts import documents_of
from nvium_core.training.recipes.catalogue import DENSE, recipe_named
from nvium_core.training.recipes.recipe import Recipe
from nvium_core.training.train import TrainingRun, prepare_run
from research.gpu.training_speed import run_on_random_tokens, timed_step

DECAY = 0.2
PART_BYTES, MAX_PARTS = 15 * 2**20, 7
OURS, TWIN = "nvium", "dense"
TOTAL = "total.json"
SCHEDULE = ("learning_rate.kind=wsd", f"learning_rate.decay={DECAY}")
TINY = (
    *("shape.num_layers=2", "shape.num_exits=2", "shape.width=32", "shape.mlp_width=48", "shape.vocab_size=280"),
    *("shape.context=64", "tokens_per_step=256", "total_tokens=15360"),
)
TINY_RECIPE, TINY_TURN = "tiny", 5


@dataclass(frozen=True)
class Plan:
    """What to train, on which text, and for how long."""

    recipe: str
    settings: tuple[str, ...]
    data: Path
    validation: Path
    folder: Path
    out: Path
    seconds: float
    turn: int
    device: Device = "cpu"
    compile: bool = False

    def recipe_of(self, name: str) -> Recipe:
        return recipe_named(self.recipe + (DENSE if name == TWIN else ""), [*SCHEDULE, *self.settings])

    def options(self, name: str, recipe: Recipe) -> RunOptions:
        """A GPU takes a step in one pass."""
        rows = max(RunOptions.rows_per_pass, recipe.tokens_per_step if self.device == "cuda" else 0)
        folder = self.folder / name
        folder.mkdir(parents=True, exist_ok=True)
        return RunOptions(data=self.data, folder=folder, device=self.device, compile=self.compile, rows_per_pass=rows)

    def run(self, name: str) -> TrainingRun:
        """Prepare a model's run, from its checkpoint if there is one."""
        recipe = self.recipe_of(name)
        options = self.options(name, recipe)
        share_text(self.folder / OURS, options.folder)
        recipe = replace(recipe, total_tokens=known_total(self.folder) or recipe.total_tokens)
        run = prepare_run(recipe, options)
        run.resume()
        return run


def tokenize(plan: Plan) -> None:
    """Write the tokenizer and the tokens of the text."""
    recipe = plan.recipe_of(OURS)
    prepare_text(recipe, plan.data, plan.options(OURS, recipe).folder)


def compile_while_tokenizing(plan: Plan) -> Plan:
    """Compile both models' steps on random tokens, which fills the compiler's cache, while a process tokenizes.

    Return the plan, without compiling if it failed.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        tokenized = pool.submit(tokenize, plan)
        try:
            for name in (OURS, TWIN):
                recipe = plan.recipe_of(name)
                options = plan.options(name, recipe)
                timed_step(run_on_random_tokens(recipe, options, min(recipe.tokens_per_step, options.rows_per_pass)))
        except Exception as error:  # the compiler raises many types of exceptions
            print(f"not compiled: {error!r}", flush=True)
            plan = replace(plan, compile=False)
        tokenized.result()
    return plan


def share_text(source: Path, target: Path) -> None:
    """Copy the tokenizer and the tokens of the first model's run, so that the text is tokenized once."""
    if source == target or (target / ORIGIN).exists():
        return
    shutil.copytree(source / "tokenizer", target / "tokenizer")
    for name in (TOKENS, ORIGIN):
        shutil.copy(source / name, target)


def train_pair(plan: Plan) -> dict[str, TrainingRun]:
    """Train both models to the end of the time or of the recipe, whichever is first."""
    began = time.monotonic()
    if plan.compile:
        plan = compile_while_tokenizing(plan)
    runs = {name: plan.run(name) for name in (OURS, TWIN)}
    plan.out.mkdir(parents=True, exist_ok=True)
    unpack(runs, plan.out / "parts")
    while (step := min(run.step for run in runs.values())) < runs[OURS].num_steps:
        goal, turn_began = min(step - step % plan.turn + plan.turn, runs[OURS].num_steps), time.monotonic()
        for name, run in runs.items():
            advance(run, goal)
            print(f"{name}: step {run.step:,} of {run.num_steps:,}, {time.monotonic() - began:.0f} s", flush=True)
        pack(runs, plan.out / "parts")
        now = time.monotonic()
        max_steps = plan.recipe_of(OURS).num_steps
        total = tokens_in_time(runs[OURS], max_steps, (now - turn_began) / (goal - step), began + plan.seconds - now)
        set_total(runs, total)
        write_json({"total_tokens": total}, plan.folder / TOTAL)
    return runs


def advance(run: TrainingRun, goal: int) -> None:
    steps = run.steps()
    while run.step < goal:
        next(steps)
    steps.close()
    run.save()


def tokens_in_time(run: TrainingRun, max_steps: int, seconds_per_step: float, seconds: float) -> int:
    """Return the total at which a run ends in time. Leave room for the decay. Once it has begun, never extend it."""
    possible = run.step + max(0, int(seconds / seconds_per_step))
    if run.progress >= 1 - DECAY:
        return min(run.num_steps, possible) * run.recipe.tokens_per_step
    decays_now = -(-run.step * 100 // round(100 * (1 - DECAY)))
    return min(max_steps, max(possible, decays_now)) * run.recipe.tokens_per_step


def set_total(runs: dict[str, TrainingRun], total_tokens: int) -> None:
    for run in runs.values():
        run.recipe = replace(run.recipe, total_tokens=total_tokens)


def known_total(folder: Path) -> int | None:
    """Return the number of tokens to which an interrupted run was shortened, or None."""
    file = folder / TOTAL
    return int(json.loads(file.read_text(encoding="utf-8"))["total_tokens"]) if file.exists() else None


def pack(runs: dict[str, TrainingRun], folder: Path) -> None:
    """Write weights in bfloat16, steps and β to files below 16 MiB."""
    state = {name: packed(run) for name, run in runs.items()}
    buffer = io.BytesIO()
    torch.save(state, buffer)
    content, partial = buffer.getvalue(), folder.with_name("parts.partial")
    if len(content) > MAX_PARTS * PART_BYTES:
        raise TrainingError(f"the weights take {len(content):,} bytes, more than {MAX_PARTS} parts of {PART_BYTES:,}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    for number, start in enumerate(range(0, len(content), PART_BYTES)):
        (partial / f"{number:02}").write_bytes(content[start : start + PART_BYTES])
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


def packed(run: TrainingRun) -> dict[str, Any]:
    weights = {name: weight.to("cpu", torch.bfloat16) for name, weight in run.model.state_dict().items()}
    return {"model": weights, "step": run.step, "beta": {"beta": run.beta.beta, "depth": run.beta.depth}}


def unpack(runs: dict[str, TrainingRun], folder: Path) -> None:
    """Load `parts/` into runs without a checkpoint."""
    if not folder.is_dir() or any(run.step for run in runs.values()):
        return
    content = b"".join(path.read_bytes() for path in sorted(folder.iterdir()))
    state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    for name, run in runs.items():
        run.model.load_state_dict(state[name]["model"])
        run.step = state[name]["step"]
        vars(run.beta).update(state[name]["beta"])


def compared(runs: dict[str, TrainingRun], plan: Plan) -> dict[str, Any]:
    """Evaluate both exported models on the validation text."""
    ours, twin = (load_model(str(runs[name].export()), plan.device) for name in (OURS, TWIN))
    documents = list(documents_of(plan.validation))
    figures = description(ours) | evaluate(ours.model, ours.tokenizer, documents)
    dense = twin_figures(twin, documents)
    steps = {name: run.step for name, run in runs.items()}
    return {"steps": steps, **figures, "twin": dense, **perplexity_gain(figures, dense)}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = ArgumentParser("research.paper_pair", description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="training text")
    parser.add_argument("--validation", type=Path, required=True, help="held-out text")
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--folder", type=Path, default=Path("runs/paper-pair"))
    parser.add_argument("--out", type=Path, help="where to write parts/ and pair.json [--folder]")
    parser.add_argument("--recipe", default="paper-24x128")
    parser.add_argument("--set", dest="settings", action="append", default=[], help="as for nvium train")
    parser.add_argument("--turn", type=int, default=100, help="steps of one model before the other's turn")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--eager", action="store_true", help="do not compile")
    parser.add_argument("--tiny", action="store_true", help="a model that any machine trains in seconds")
    args = parser.parse_args(arguments)
    plan = Plan(
        recipe=TINY_RECIPE if args.tiny else args.recipe,
        settings=(*(TINY if args.tiny else ()), *args.settings),
        data=args.data,
        validation=args.validation,
        folder=args.folder,
        out=args.out or args.folder,
        seconds=60 * args.minutes,
        turn=TINY_TURN if args.tiny else args.turn,
        device=args.device,
        compile=not (args.eager or args.tiny),
    )
    figures = compared(train_pair(plan), plan)
    write_json(figures, plan.out / "pair.json")
    print(
        f"perplexity {figures['perplexity']:.4g}, twin {figures['twin']['perplexity']:.4g}: gain "
        f"{figures['perplexity_gain_percent']:.2f}% at mean depth {figures['mean_depth']:.2f}, {figures['steps']}",
        *warnings(figures),
        sep="\n",
    )


if __name__ == "__main__":
    main()
