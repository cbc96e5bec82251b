"""Train CALM* with the shape of a recipe's dense twin, and compare it with the twin.

    python -m research.baselines train calm small --data train.txt.xz
    python -m research.baselines evaluate runs/small-calm/model --twin runs/small-dense/model --data valid.txt.xz

Evaluation measures each of CALM*'s thresholds. `--json` writes the points for `python -m research.paper.pareto`.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from nvium_core.bench.figures import Figures, write_json
from nvium_core.evaluation.suite import check_dense, description, perplexity_gain, twin_figures
from nvium_core.loading import LoadedModel, load_model
from nvium_core.options import RunOptions
from nvium_core.training.data.texts import documents_of
from nvium_core.training.recipes.catalogue import recipe_named
from nvium_core.training.recipes.recipe import Recipe, dense_twin
from nvium_core.training.train import train
from research.baselines import calm
from research.baselines.calm import THRESHOLDS, CalmForCausalLM
from research.baselines.confidence import evaluate_calm
from research.paper import pareto
from research.speed.per_token import DENSE, OURS, TRIALS, generator, latency, speed_up, take_turns, warm_engine
from research.speed.prompts import Prompts, openings, read_questions, tokenize_prompts

CALM = "CALM*"


def evaluate_baseline(
    loaded: LoadedModel,
    twin: LoadedModel,
    documents: Sequence[str],
    prompts: Prompts,
    *,
    trials: int = TRIALS,
) -> list[Figures]:
    """Return a point for each of CALM*'s `THRESHOLDS`: its loss, and its speed in the engine."""
    assert isinstance(loaded.model, CalmForCausalLM)
    check_dense(loaded, twin)
    losses = evaluate_calm(loaded.model, loaded.tokenizer, documents, THRESHOLDS)
    dense = twin_figures(twin, documents)
    about, speeds = description(loaded), speed_ups(loaded, twin, prompts, trials)
    return [
        {
            **about,
            "folder": loaded.name,
            "model": f"{CALM} τ {loss['threshold']}",
            "family": CALM,
            **loss,
            "twin": dense,
            **perplexity_gain(about | loss, dense),
            **speed,
        }
        for loss, speed in zip(losses, speeds, strict=True)
    ]


def speed_ups(loaded: LoadedModel, twin: LoadedModel, prompts: Prompts, trials: int) -> list[Figures]:
    """Return the times per token of each threshold and of the dense twin, which take turns, and the speed-up."""
    ours, dense = (warm_engine(each.model, "sweep") for each in (loaded, twin))
    prompt_set = tokenize_prompts(loaded.tokenizer, prompts, min(ours.context, dense.context))
    generators = {
        f"τ {each}": generator(ours, prompt_set, sampling="confidence", threshold=each) for each in THRESHOLDS
    }
    answers = take_turns(generators | {DENSE: generator(dense, prompt_set)}, prompt_set, trials)
    pairs = ({OURS: answers[name], DENSE: answers[DENSE]} for name in generators)
    return [speed_up(latency(pair, prompt_set, trials, loaded.model.config.exit_layers or [])) for pair in pairs]


def calm_recipe(name: str, settings: list[str]) -> Recipe:
    """Return a recipe's dense twin with exits after each quarter, trained as CALM*."""
    dense = dense_twin(recipe_named(name, settings))
    shape, module = replace(dense.shape, num_exits=4), calm.__name__
    return replace(dense, shape=shape, model=f"{module}.model", objective=f"{module}.objective")


def run_training(args: Namespace) -> None:
    folder = args.folder or Path("runs") / f"{args.recipe}-{args.method}"
    print(train(calm_recipe(args.recipe, args.settings), RunOptions(data=args.data, folder=folder)))


def run_evaluation(args: Namespace) -> None:
    documents = list(documents_of(args.data))
    prompts = read_questions(args.questions, args.prompts) if args.questions else openings(documents)
    loaded, twin = load_model(args.model, "cpu", kind=CalmForCausalLM), load_model(args.twin, "cpu")
    points = evaluate_baseline(loaded, twin, documents, prompts, trials=args.trials)
    print(pareto.markdown(points))
    if args.json:
        write_json(points, args.json)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(prog="python -m research.baselines", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    training = commands.add_parser("train")
    training.add_argument("method", choices=["calm"])
    training.add_argument("recipe", help="recipe, such as small or paper-24x768")
    training.add_argument("--data", type=Path, required=True)
    training.add_argument("--folder", type=Path)
    training.add_argument("--set", dest="settings", action="append", default=[], help="as for nvium train")
    training.set_defaults(run=run_training)
    evaluation = commands.add_parser("evaluate")
    evaluation.add_argument("model")
    evaluation.add_argument("--twin", required=True, help="folder of the dense twin")
    evaluation.add_argument("--data", type=Path, required=True)
    evaluation.add_argument("--questions", type=Path, help="Spec-Bench's question.jsonl [openings of the text]")
    evaluation.add_argument("--prompts", type=int, help="prompts per category [all]")
    evaluation.add_argument("--trials", type=int, default=TRIALS)
    evaluation.add_argument("--json", type=Path)
    evaluation.set_defaults(run=run_evaluation)
    args = parser.parse_args(arguments)
    args.run(args)


if __name__ == "__main__":
    main()
