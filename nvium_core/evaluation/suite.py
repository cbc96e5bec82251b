"""The parts of `nvium evaluate`, and where results are written."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path

import torch

from nvium_core.bench.harness import Figures, subject_of
from nvium_core.choices import Clock
from nvium_core.engine.params import SamplingParams
from nvium_core.evaluation import latency, perplexity, report, tasks, temperature
from nvium_core.evaluation.coloured_text import page
from nvium_core.evaluation.greedy import evaluate_greedy
from nvium_core.evaluation.origin import OPENINGS
from nvium_core.evaluation.paired import perplexity_gain, perplexity_price
from nvium_core.evaluation.predictions import EvaluationError
from nvium_core.evaluation.spec_bench import Prompts, read_prompts
from nvium_core.evaluation.turns import TRIALS
from nvium_core.loading import LoadedModel
from nvium_core.model.checkpoint import MODEL_FOLDER
from nvium_core.model.flops import flops_before_speaking, flops_per_token, spoken_flops
from nvium_core.training.run_folder import recipe_of, tokens_read

OPENING_CHARACTERS = 200
NUM_OPENINGS = 8
SAMPLES, SAMPLE_TOKENS = 3, 200


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The optional parts, besides quality, routing and FLOPs. Speed is measured with a twin or Spec-Bench; without the
    latter on openings of documents, as one category. `unrounded` is the same model with weights as they are."""

    greedy: bool = False
    temperatures: bool = False
    num_texts: int = temperature.NUM_TEXTS
    tokens_per_text: int = temperature.TOKENS_PER_TEXT
    unrounded: LoadedModel | None = None
    twin: LoadedModel | None = None
    spec_bench: Path | None = None
    prompts_per_category: int | None = None
    trials: int = TRIALS
    clock: Clock = "wall"
    as_paper: bool = False
    tasks: Sequence[str] = ()
    tasks_folder: Path | None = None


def evaluate(loaded: LoadedModel, documents: Sequence[str], parts: Parts, show_progress: bool = True) -> Figures:
    """All figures, for JSON. Contradictions are refused before anything is measured."""
    check(loaded, parts)
    prompts = speed_prompts(documents, parts)
    begun = (
        temperature.openings(loaded, documents, parts.num_texts, parts.tokens_per_text) if parts.temperatures else []
    )
    figures = description(loaded)
    figures |= asdict(perplexity.evaluate(loaded.model, loaded.tokenizer, documents, show_progress))
    if parts.unrounded:
        figures["rounding"] = rounding(figures, parts.unrounded, documents, show_progress)
    figures["theoretical_speed_up_percent"] = 100 * (1 / figures["mean_depth"] - 1)
    figures["flops"] = flops(loaded, figures["exit_shares"])
    if parts.greedy:
        decided = asdict(evaluate_greedy(loaded.model, loaded.tokenizer, documents, show_progress))
        figures |= {f"greedy_{name}": value for name, value in decided.items()}
    if parts.twin:
        figures |= beside_twin(figures, parts.twin, documents, show_progress)
    if prompts:
        figures |= speed(loaded, parts.twin, prompts, parts.trials, parts.clock)
    if prompts and parts.as_paper:
        figures["latency_as_paper"] = latency.as_paper(loaded, parts.twin, prompts, parts.trials, parts.clock)
    if begun:
        figures["temperatures"] = temperature.measure(loaded, begun)
    if parts.tasks:
        figures["tasks"] = tasks.evaluate_tasks(loaded, parts.tasks, parts.tasks_folder)
    return figures


def check(loaded: LoadedModel, parts: Parts) -> None:
    """Raise `EvaluationError` for a twin that cannot be compared, for speed settings without speed, for the processor's
    time of several threads, and for tasks without lm_eval."""
    if not (parts.twin or parts.spec_bench):
        for name, value, default in (
            ("prompts", parts.prompts_per_category, None),
            ("trials", parts.trials, TRIALS),
            ("clock", parts.clock, "wall"),
            ("as-paper", parts.as_paper, False),
        ):
            if value != default:
                raise EvaluationError(f"--{name}: means nothing without --twin or --spec-bench")
    if parts.clock == "processor" and torch.get_num_threads() > 1:
        raise EvaluationError("--clock: processor adds up the time of all threads, so it needs --threads 1")
    if parts.twin:
        check_dense(loaded, parts.twin)
    if parts.tasks:
        tasks.harness(".models.huggingface")


def check_dense(loaded: LoadedModel, twin: LoadedModel) -> None:
    if twin.model.config.num_exits > 1:
        raise EvaluationError(f"--twin: {twin.name} has early exits, so it is no dense model")
    if twin.tokenizer.get_vocab() != loaded.tokenizer.get_vocab():
        raise EvaluationError(f"--twin: {twin.name} has another tokenizer, so that perplexities cannot be compared")


def check_places(json_file: Path | None, report_folder: Path | None) -> None:
    """Raise `EvaluationError` if results could not be written; makes the folder."""
    if json_file and not json_file.parent.is_dir():
        raise EvaluationError(f"json: no such folder: {json_file.parent}")
    if report_folder:
        report_folder.mkdir(parents=True, exist_ok=True)


def speed_prompts(documents: Sequence[str], parts: Parts) -> Prompts:
    """By category; empty where speed is not measured."""
    if parts.spec_bench:
        return read_prompts(parts.spec_bench, parts.prompts_per_category)
    return openings(documents, parts.prompts_per_category) if parts.twin else {}


def openings(documents: Sequence[str], number: int | None = None) -> Prompts:
    """Openings of that many documents, a few if None, as one category."""
    number = number or NUM_OPENINGS
    spread = documents[:: max(1, len(documents) // number)][:number]
    return {OPENINGS: [document[:OPENING_CHARACTERS] for document in spread]}


def description(loaded: LoadedModel) -> Figures:
    """Which model. A run's model is named after the run's folder, which also says what it has read."""
    config, folder = loaded.model.config, loaded.folder
    run = folder.parent if folder and folder.name == MODEL_FOLDER else None
    return {
        **subject_of(loaded).as_dict(),
        "model": run.name if run else loaded.name,
        "recipe": recipe_of(run) if run else None,
        "training_tokens": tokens_read(run) if run else None,
        "num_parameters": loaded.model.num_parameters(),
        "num_layers": config.num_hidden_layers,
        "width": config.hidden_size,
        "exit_layers": config.exit_layers,
    }


def flops(loaded: LoadedModel, exit_shares: Sequence[float]) -> Figures:
    """At the full context."""
    config = loaded.model.config
    positions = config.max_position_embeddings
    return {
        "positions": positions,
        "all_exits": flops_per_token(config, positions).as_dict(),
        "spoken": spoken_flops(config, positions, exit_shares).as_dict(),
        "before_speaking": flops_before_speaking(config, positions, exit_shares).as_dict(),
    }


def rounding(figures: Figures, unrounded: LoadedModel, documents: Sequence[str], show_progress: bool) -> Figures:
    """The perplexity without rounded weights, and what rounding adds."""
    exact = asdict(perplexity.evaluate(unrounded.model, unrounded.tokenizer, documents, show_progress))
    return {"unrounded_perplexity": exact["perplexity"], **perplexity_price(figures, exact)}


def beside_twin(figures: Figures, twin: LoadedModel, documents: Sequence[str], show_progress: bool) -> Figures:
    """The twin's quality and costs, and our gain."""
    dense = twin_figures(twin, documents, show_progress)
    return {"twin": dense, **perplexity_gain(figures, dense)}


def twin_figures(twin: LoadedModel, documents: Sequence[str], show_progress: bool) -> Figures:
    """A dense model's quality and costs."""
    quality = perplexity.evaluate(twin.model, twin.tokenizer, documents, show_progress)
    config = twin.model.config
    return {
        **description(twin),
        "perplexity": quality.perplexity,
        "bits_per_character": quality.bits_per_character,
        **{name: getattr(quality, name) for name in ("by_position", "document_tokens", "document_losses")},
        "flops": flops_per_token(config, config.max_position_embeddings).as_dict(),
    }


def speed(
    loaded: LoadedModel, twin: LoadedModel | None, prompts: Prompts, trials: int = TRIALS, clock: Clock = "wall"
) -> Figures:
    """Times per token, and the speed-up over the twin, or over full depth without one."""
    measured = latency.measure(loaded, twin, prompts, trials=trials, clock=clock)
    over = latency.DENSE if twin else latency.FULL_DEPTH
    interval = measured["ratio_intervals"][over]
    return {
        "latency": measured,
        "speed_up_over": over,
        "speed_up_percent": 100 * (measured["ratios"][over] - 1),
        "speed_up_interval_percent": interval and [100 * (bound - 1) for bound in interval],
    }


def write_report(loaded: LoadedModel, figures: Figures, documents: Sequence[str], folder: Path) -> None:
    """Into an existing folder: report.md, evaluation.json, the plots, and text coloured by exit in samples.html."""
    plots = import_module("nvium_core.evaluation.plots").PLOTS
    drawn = [name for name, (key, _) in plots.items() if key in figures]
    for name in drawn:
        plots[name][1](figures).savefig(folder / f"{name}.png")
    (folder / "samples.html").write_text(samples(loaded, documents), encoding="utf-8")
    (folder / "report.md").write_text(report.markdown(figures, drawn), encoding="utf-8")
    write_json(figures, folder / "evaluation.json")


def write_json(figures: Figures | Sequence[Figures], path: Path) -> None:
    path.write_text(json.dumps(figures, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def samples(loaded: LoadedModel, documents: Sequence[str]) -> str:
    """A page of openings continued by the model."""
    engine = latency.warm_engine(loaded.model, "sweep")
    texts = []
    for seed, document in enumerate(documents[:SAMPLES]):
        prompt = loaded.tokenizer(document[:OPENING_CHARACTERS]).input_ids[: engine.context // 2]
        params = SamplingParams(max_tokens=min(SAMPLE_TOKENS, engine.context // 2), seed=seed)
        texts.append((prompt, latency.generate(engine, prompt, params)))
    return page(loaded, texts)
