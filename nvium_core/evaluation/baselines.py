"""CALM* and LayerSkip as points of the quality-speed figure: one for each threshold, or for each draft setting.

A point holds what `comparison` needs, both figures over the dense twin. Training is elsewhere.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial

from nvium_core.bench.harness import Figures
from nvium_core.choices import Device, Precision
from nvium_core.evaluation import perplexity, plain_speed
from nvium_core.evaluation.calm import evaluate_calm
from nvium_core.evaluation.latency import DENSE
from nvium_core.evaluation.paired import perplexity_gain
from nvium_core.evaluation.plain_speed import Answers, Generate
from nvium_core.evaluation.predictions import EvaluationError
from nvium_core.evaluation.spec_bench import Prompts
from nvium_core.evaluation.suite import check_dense, description, twin_figures
from nvium_core.evaluation.turns import TRIALS, Questions, questions
from nvium_core.loading import LoadedModel, load_model
from nvium_core.model.nvium import NviumForCausalLM
from nvium_core.training.baselines import confidence, speculation, univium
from nvium_core.training.baselines.calm import THRESHOLDS, CalmForCausalLM, is_calm
from nvium_core.training.baselines.layerskip import DRAFTS

CALM, LAYERSKIP = "CALM*", "LayerSkip"


@dataclass(frozen=True, kw_only=True)
class Way:
    """One setting of a trained model: its name in the figure, its parameters, and how well it predicts."""

    name: str
    family: str
    figures: Figures
    generate: Generate


def load_baseline(source: str, device: Device = "auto", dtype: Precision = "auto") -> LoadedModel:
    """A CALM*, recognised by its configuration, or a Llama, LayerSkip's format. Raises `CheckpointError` naming what is
    wrong with a folder, and `EvaluationError` if it holds an N-vium."""
    loaded = load_model(source, device, dtype, CalmForCausalLM if is_calm(source) else NviumForCausalLM)
    if not isinstance(loaded.model, CalmForCausalLM) and loaded.model.config.num_exits > 1:
        raise EvaluationError(f"{source}: neither a CALM* nor a Llama, but an N-vium, which `nvium evaluate` measures")
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
    """A point for each of CALM*'s `THRESHOLDS`, or of LayerSkip's `DRAFTS` whose exit the model has.

    Raises `EvaluationError` for a twin that cannot be compared, or a model too shallow to draft.
    """
    check_dense(loaded, twin)
    ways = calm_ways if isinstance(loaded.model, CalmForCausalLM) else layerskip_ways
    measured = ways(loaded, documents, show_progress)
    dense = twin_figures(twin, documents, show_progress)
    context = min(each.model.config.max_position_embeddings for each in (loaded, twin))
    asked = questions(loaded.tokenizer, prompts, context)
    generators: dict[str, Generate] = {way.name: way.generate for way in measured}
    generators[DENSE] = partial(univium.generate, twin.model)
    answers = plain_speed.measure(generators, asked, trials, show_progress)
    return [quality(way, loaded, dense) | speed(way, loaded, answers) | protocol(asked, trials) for way in measured]


def calm_ways(loaded: LoadedModel, documents: Sequence[str], show_progress: bool) -> list[Way]:
    assert isinstance(loaded.model, CalmForCausalLM)
    return [calm_way(loaded, loaded.model, documents, threshold, show_progress) for threshold in THRESHOLDS]


def calm_way(
    loaded: LoadedModel, model: CalmForCausalLM, documents: Sequence[str], threshold: float, show_progress: bool
) -> Way:
    figures = asdict(evaluate_calm(model, loaded.tokenizer, documents, threshold, show_progress))
    return Way(
        name=f"{CALM} τ {threshold}",
        family=CALM,
        figures=figures | {"theoretical_speed_up_percent": 100 * (1 / figures["mean_depth"] - 1)},
        generate=partial(confidence.generate, model, threshold=threshold),
    )


def layerskip_ways(loaded: LoadedModel, documents: Sequence[str], show_progress: bool) -> list[Way]:
    """They differ in speed only, since drafts are verified."""
    depth = loaded.model.config.num_hidden_layers
    drafts = [(exit_layer, length) for exit_layer, length in DRAFTS if exit_layer < depth]
    if not drafts:
        raise EvaluationError(f"{loaded.name}: {depth} layers are too few to draft after {min(DRAFTS)[0]} of them")
    found = perplexity.evaluate(loaded.model, loaded.tokenizer, documents, show_progress)
    figures = {field.name: getattr(found, field.name) for field in fields(perplexity.TextLoss)}
    return [layerskip_way(loaded.model, figures, *draft) for draft in drafts]


def layerskip_way(model: NviumForCausalLM, figures: Figures, exit_layer: int, draft_length: int) -> Way:
    return Way(
        name=f"{LAYERSKIP} {exit_layer}, {draft_length}",
        family=LAYERSKIP,
        figures=figures | {"exit_layer": exit_layer, "draft_length": draft_length},
        generate=partial(speculation.generate, model, exit_layer=exit_layer, draft_length=draft_length),
    )


def quality(way: Way, loaded: LoadedModel, dense: Figures) -> Figures:
    """Which model, how well it predicts at this setting, and its gain over the dense one."""
    return {
        **description(loaded),
        "folder": loaded.name,
        "model": way.name,
        "family": way.family,
        **way.figures,
        "twin": dense,
        **perplexity_gain(way.figures, dense),
    }


def speed(way: Way, loaded: LoadedModel, answers: dict[str, Answers]) -> Figures:
    """Times beside the dense model's. `early_share` is the share of tokens that left early, or of accepted drafts."""
    ours, depth = answers[way.name], loaded.model.config.num_hidden_layers
    return plain_speed.beside_dense(ours, answers[DENSE]) | {"early_share": plain_speed.early_share(ours, depth)}


def protocol(asked: Questions, trials: int) -> Figures:
    return {
        "prompts": asked.counts,
        "prompts_cut": asked.prompts_cut,
        "max_new_tokens": asked.max_new_tokens,
        "trials": trials,
    }
