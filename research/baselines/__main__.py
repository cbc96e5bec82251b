"""Train CALM* and LayerSkip with the shape of a recipe's dense twin, and compare them with the twin.

    python -m research.baselines train calm small --data train.txt.xz
    python -m research.baselines evaluate runs/small-calm/model --twin runs/small-dense/model --data valid.txt.xz

Evaluation measures each of CALM*'s thresholds or LayerSkip's draft settings. `--json` writes the points for
`python -m research.paper.pareto`.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path

from nvium_core.bench.figures import Figures, write_json
from nvium_core.choices import Device, Precision
from nvium_core.evaluation import perplexity
from nvium_core.evaluation.paired import perplexity_gain
from nvium_core.evaluation.predictions import EvaluationError
from nvium_core.evaluation.suite import check_dense, description, twin_figures
from nvium_core.loading import LoadedModel, load_model
from nvium_core.model.nvium import Nvium
from nvium_core.training.data.corpus import read_documents
from nvium_core.training.options import RunOptions
from nvium_core.training.recipes.catalogue import recipe_named
from nvium_core.training.recipes.recipe import Recipe
from nvium_core.training.recipes.twins import dense_twin
from nvium_core.training.train import train
from research.baselines import confidence, decoding, plain_speed, speculation
from research.baselines.calm import THRESHOLDS, CalmForCausalLM, is_calm
from research.baselines.confidence import evaluate_calm
from research.baselines.layerskip import DRAFTS
from research.baselines.plain_speed import Answers, Generate
from research.paper import pareto
from research.speed.per_token import DENSE, TRIALS
from research.speed.prompts import Prompts, PromptSet, openings, read_questions, tokenize_prompts

CALM, LAYERSKIP = "CALM*", "LayerSkip"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One setting of a trained model, such as a threshold: its name in the figure, its loss and its generator."""

    name: str
    family: str
    figures: Figures
    generate: Generate


def load_baseline(source: str, device: Device = "auto", dtype: Precision = "auto") -> LoadedModel:
    """Load a CALM* or LayerSkip model. LayerSkip is saved as a Llama. Raise `EvaluationError` for an N-vium."""
    loaded = load_model(source, device, dtype, CalmForCausalLM if is_calm(source) else Nvium)
    if not isinstance(loaded.model, CalmForCausalLM) and loaded.model.config.num_exits > 1:
        raise EvaluationError(f"{source}: must be a CALM* or a Llama, got an N-vium; use `nvium evaluate`")
    return loaded


def evaluate_baseline(
    loaded: LoadedModel,
    twin: LoadedModel,
    documents: Sequence[str],
    prompts: Prompts,
    *,
    trials: int = TRIALS,
    show_progress: bool = True,
) -> list[Figures]:
    """Return a point for each of CALM*'s `THRESHOLDS`, or for each of LayerSkip's `DRAFTS` that fits the model."""
    check_dense(loaded, twin)
    settings_of = calm_settings if isinstance(loaded.model, CalmForCausalLM) else layerskip_settings
    measured = settings_of(loaded, documents, show_progress)
    dense = twin_figures(twin, documents, show_progress)
    context = min(each.model.config.max_position_embeddings for each in (loaded, twin))
    prompt_set = tokenize_prompts(loaded.tokenizer, prompts, context)
    generators: dict[str, Generate] = {setting.name: setting.generate for setting in measured}
    generators[DENSE] = partial(decoding.generate, twin.model)
    answers = plain_speed.measure(generators, prompt_set, trials, show_progress)
    return [
        quality(setting, loaded, dense) | speed(setting, loaded, answers) | protocol(prompt_set, trials)
        for setting in measured
    ]


def calm_settings(loaded: LoadedModel, documents: Sequence[str], show_progress: bool) -> list[Setting]:
    assert isinstance(loaded.model, CalmForCausalLM)
    return [calm_setting(loaded, loaded.model, documents, threshold, show_progress) for threshold in THRESHOLDS]


def calm_setting(
    loaded: LoadedModel, model: CalmForCausalLM, documents: Sequence[str], threshold: float, show_progress: bool
) -> Setting:
    figures = asdict(evaluate_calm(model, loaded.tokenizer, documents, threshold, show_progress))
    return Setting(
        name=f"{CALM} τ {threshold}",
        family=CALM,
        figures=figures | {"theoretical_speed_up_percent": 100 * (1 / figures["mean_depth"] - 1)},
        generate=partial(confidence.generate, model, threshold=threshold),
    )


def layerskip_settings(loaded: LoadedModel, documents: Sequence[str], show_progress: bool) -> list[Setting]:
    """Return LayerSkip's settings. All settings have the same loss, because all layers verify the drafts."""
    depth = loaded.model.config.num_hidden_layers
    drafts = [(exit_layer, length) for exit_layer, length in DRAFTS if exit_layer < depth]
    if not drafts:
        raise EvaluationError(f"{loaded.name}: too shallow: drafts need more than {min(DRAFTS)[0]} layers, got {depth}")
    found = perplexity.evaluate(loaded.model, loaded.tokenizer, documents, show_progress)
    figures = {field.name: getattr(found, field.name) for field in fields(confidence.TextLoss)}
    return [layerskip_setting(loaded.model, figures, *draft) for draft in drafts]


def layerskip_setting(model: Nvium, figures: Figures, exit_layer: int, draft_length: int) -> Setting:
    return Setting(
        name=f"{LAYERSKIP} {exit_layer}, {draft_length}",
        family=LAYERSKIP,
        figures=figures | {"exit_layer": exit_layer, "draft_length": draft_length},
        generate=partial(speculation.generate, model, exit_layer=exit_layer, draft_length=draft_length),
    )


def quality(setting: Setting, loaded: LoadedModel, dense: Figures) -> Figures:
    """Return the model's description, its loss at this setting, and its gain over the dense twin."""
    return {
        **description(loaded),
        "folder": loaded.name,
        "model": setting.name,
        "family": setting.family,
        **setting.figures,
        "twin": dense,
        **perplexity_gain(setting.figures, dense),
    }


def speed(setting: Setting, loaded: LoadedModel, answers: dict[str, Answers]) -> Figures:
    """Return the speed-up over the dense twin. `early_share` is the share of early exits, or of accepted drafts."""
    ours, depth = answers[setting.name], loaded.model.config.num_hidden_layers
    return plain_speed.compared_with_dense(ours, answers[DENSE]) | {"early_share": plain_speed.early_share(ours, depth)}


def protocol(prompt_set: PromptSet, trials: int) -> Figures:
    return {
        "prompts": prompt_set.counts,
        "prompts_cut": prompt_set.prompts_cut,
        "max_new_tokens": prompt_set.max_new_tokens,
        "trials": trials,
    }


def baseline_recipe(method: str, name: str, settings: list[str]) -> Recipe:
    """Return a recipe's dense twin with exits: after each quarter for CALM*, after every second layer for LayerSkip."""
    dense = dense_twin(recipe_named(name, settings))
    num_exits = 4 if method == "calm" else dense.shape.num_layers // 2
    shape = replace(dense.shape, num_exits=num_exits)
    return replace(
        dense, shape=shape, model=f"{__package__}.{method}.model", objective=f"{__package__}.{method}.objective"
    )


def run_training(args: Namespace) -> None:
    folder = args.folder or Path("runs") / f"{args.recipe}-{args.method}"
    options = RunOptions(data=args.data, folder=folder)
    print(train(baseline_recipe(args.method, args.recipe, args.settings), options))


def run_evaluation(args: Namespace) -> None:
    documents = read_documents(args.data)
    prompts = read_questions(args.questions, args.prompts) if args.questions else openings(documents)
    loaded, twin = load_baseline(args.model, "cpu"), load_model(args.twin, "cpu")
    points = evaluate_baseline(loaded, twin, documents, prompts, trials=args.trials)
    print(pareto.markdown(points))
    if args.json:
        write_json(points, args.json)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(prog="python -m research.baselines", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    training = commands.add_parser("train")
    training.add_argument("method", choices=["calm", "layerskip"])
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
