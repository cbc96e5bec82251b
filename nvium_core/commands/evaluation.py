"""How good a model is, and models compared."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from nvium_core.choices import Clock
from nvium_core.commands.options import ModelArgument, takes
from nvium_core.options import ModelOptions

DataOption = Annotated[Path, typer.Option(help="Text as `nvium train` reads it.")]
SpecBenchOption = Annotated[Path | None, typer.Option(help="Spec-Bench's question.jsonl, to measure speed on.")]
PromptsOption = Annotated[
    int | None, typer.Option(help="Of each of its categories [all]; without it, openings of documents [8].", min=1)
]
TrialsOption = Annotated[int, typer.Option(help="Answers to each prompt, for speed.", min=1)]
JsonOption = Annotated[Path | None, typer.Option("--json", help="Write the figures here too.")]


@takes(ModelOptions)
def evaluate(
    data: DataOption,
    model: ModelArgument = None,
    greedy: Annotated[bool, typer.Option(help="Temperature 0 too: is it the argmax, how often does it leave.")] = False,
    temperatures: Annotated[bool, typer.Option("--temperatures", help="What temperature does to text.")] = False,
    twin: Annotated[str | None, typer.Option(help="A dense model's folder: its perplexity, and speed over it.")] = None,
    spec_bench: SpecBenchOption = None,
    prompts: PromptsOption = None,
    trials: TrialsOption = 3,
    clock: Annotated[
        Clock, typer.Option(help="Of speed: time that passes, or the processor's, for which --threads must be 1.")
    ] = "wall",
    as_paper: Annotated[bool, typer.Option("--as-paper", help="Speed as the authors' scripts have it too.")] = False,
    tasks: Annotated[str | None, typer.Option(help="Tasks of lm_eval, comma separated.")] = None,
    tasks_folder: Annotated[Path | None, typer.Option(help="Where .yaml files describe further ones.")] = None,
    report: Annotated[Path | None, typer.Option(help="A folder for report.md, figures and coloured text.")] = None,
    json_file: JsonOption = None,
    **given: Any,
) -> None:
    """Perplexity of π_mix, of each exit and of an oracle; routing, calibration, FLOPs; and what else is asked for."""
    from rich.console import Console
    from rich.markdown import Markdown

    from nvium_core import load_mapped
    from nvium_core.engine.device.processor import use_processor
    from nvium_core.evaluation import suite
    from nvium_core.evaluation.origin import measured_on
    from nvium_core.evaluation.report import markdown
    from nvium_core.training.data.corpus import documents_of

    suite.check_places(json_file, report)
    documents = list(documents_of(data))
    options = ModelOptions(**given)
    use_processor(options.instructions, options.threads)
    loaded = load_mapped(model, options.device, options.dtype, options.weights)
    is_rounded = options.weights in ("q8", "q4")
    parts = suite.Parts(
        unrounded=load_mapped(model, options.device, options.dtype, "native") if is_rounded else None,
        greedy=greedy,
        temperatures=temperatures,
        twin=load_mapped(twin, options.device, options.dtype) if twin else None,
        spec_bench=spec_bench,
        prompts_per_category=prompts,
        trials=trials,
        clock=clock,
        as_paper=as_paper,
        tasks=tasks.split(",") if tasks else (),
        tasks_folder=tasks_folder,
    )
    figures = measured_on(data, documents, spec_bench, prompts) | suite.evaluate(loaded, documents, parts)
    Console().print(Markdown(markdown(figures)))
    if json_file:
        suite.write_json(figures, json_file)
    if report:
        suite.write_report(loaded, figures, documents, report)


@takes(ModelOptions)
def evaluate_chat(
    data: Annotated[Path, typer.Option(help="Stories to ask for, or a .jsonl of chats; see docs/chat.md.")],
    model: ModelArgument = None,
    conversations: Annotated[int, typer.Option(help="So many of them, spread over the text.", min=1)] = 100,
    json_file: JsonOption = None,
    **given: Any,
) -> None:
    """Perplexity of written answers for a model taught to chat, and whether its own answers end."""
    from nvium_core import load_mapped
    from nvium_core.engine.device.processor import use_processor
    from nvium_core.evaluation import chat, suite
    from nvium_core.evaluation.report import table

    suite.check_places(json_file, None)
    options = ModelOptions(**given)
    use_processor(options.instructions, options.threads)
    loaded = load_mapped(model, options.device, options.dtype, options.weights)
    found = chat.evaluate_chat(loaded.model, chat.held_out(loaded, data, conversations), show_progress=True)
    figures = suite.description(loaded) | asdict(found)
    print(table(["figure", "value"], figures.items()))
    if json_file:
        suite.write_json(figures, json_file)


@takes(ModelOptions)
def evaluate_baseline(
    model: Annotated[str, typer.Argument(help="The folder of a CALM*, or of LayerSkip, which is a Llama.")],
    twin: Annotated[str, typer.Option(help="The dense model's folder.")],
    data: DataOption,
    spec_bench: SpecBenchOption = None,
    prompts: PromptsOption = None,
    trials: TrialsOption = 3,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the points here, for nvium compare.")] = None,
    **given: Any,
) -> None:
    """Other methods' points of the quality-speed figure: CALM* at each threshold, LayerSkip with each draft."""
    from nvium_core import load_model
    from nvium_core.engine.device.processor import use_processor
    from nvium_core.evaluation import baselines, comparison, suite
    from nvium_core.evaluation.origin import measured_on
    from nvium_core.evaluation.spec_bench import read_prompts
    from nvium_core.training.data.corpus import documents_of

    suite.check_places(json_file, None)
    documents = list(documents_of(data))
    asked = read_prompts(spec_bench, prompts) if spec_bench else suite.openings(documents, prompts)
    options = ModelOptions(**given)
    use_processor(options.instructions, options.threads)
    loaded = baselines.load_baseline(model, options.device, options.dtype)
    origin = measured_on(data, documents, spec_bench, prompts)
    dense = load_model(twin, options.device, options.dtype)
    found = baselines.evaluate_baseline(loaded, dense, documents, asked, trials=trials)
    points = [origin | point for point in found]
    print(comparison.markdown(points))
    if json_file:
        suite.write_json(points, json_file)


@takes(ModelOptions)
def iso(
    depths: Annotated[str, typer.Option(help="Layers of the dense models, such as 6,9,12.")],
    model: ModelArgument = None,
    shape: Annotated[
        str | None, typer.Option(help="Random weights instead, of one of the paper's shapes, such as 36x768.")
    ] = None,
    tokens: Annotated[
        float | None, typer.Option(help="That the model was trained on [its run's or the paper's; 1: ratios].", min=1)
    ] = None,
    trials: Annotated[int, typer.Option(help="Answers of each, for speed.", min=1)] = 5,
    json_file: JsonOption = None,
    **given: Any,
) -> None:
    """Dense models of equal cost: tokens of equal training FLOPs by depth, and the depth of equal speed."""
    from nvium_core.bench.harness import load_subjects
    from nvium_core.engine.device.processor import use_processor
    from nvium_core.evaluation import iso, suite
    from nvium_core.planning.plan import counts

    suite.check_places(json_file, None)
    options = ModelOptions(**given)
    use_processor(options.instructions, options.threads)
    [subject] = load_subjects(model, shape, None, options.device, options.dtype, options.weights)
    read = tokens or iso.trained_tokens(model, shape) or 1
    figures = iso.evaluate_iso(subject, counts(depths, "depths"), read, trials)
    print(iso.markdown(figures))
    if json_file:
        suite.write_json(figures, json_file)


def compare(
    evaluations: Annotated[
        list[Path], typer.Argument(help="What `nvium evaluate --twin …` and `nvium evaluate-baseline` wrote by --json.")
    ],
    plot: Annotated[Path | None, typer.Option(help="Draw quality against speed, into a .png.")] = None,
    paper: Annotated[bool, typer.Option("--paper", help="Draw the paper's points too.")] = False,
) -> None:
    """Compare models: a Markdown table, and the quality-speed figure."""
    from nvium_core.evaluation import comparison

    found = comparison.read_evaluations(evaluations)
    print(comparison.markdown(found))
    if plot:
        comparison.draw(found, plot, with_paper=paper)
