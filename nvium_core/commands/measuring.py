"""`nvium bench` and `nvium evaluate`."""

import inspect
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from nvium_core.commands.options import ModelArgument, takes
from nvium_core.options import ModelOptions

Experiment = Literal["peers", "schedules", "profile"]
"""Modules of `nvium_core.bench` with `measure(subject, …)`, whose keywords are options, and `table(figures)`."""


@takes(ModelOptions)
def bench(
    experiment: Annotated[Experiment, typer.Argument(help="The experiment to run.")] = "peers",
    model: Annotated[str | None, typer.Option(help="A folder, Hub name or GGUF file [the bundled model].")] = None,
    shape: Annotated[
        str | None,
        typer.Option(help="Measure random weights of this shape: layers x width, such as 24x768, or ouro-1.4b."),
    ] = None,
    loops: Annotated[int | None, typer.Option(help="With --shape: run the layers so often, with an exit each.")] = None,
    routing: Annotated[str | None, typer.Option(help="With --shape: exit shares p_1,p_2,… [the paper's].")] = None,
    sequences: Annotated[str | None, typer.Option(help="Batch sizes to measure, such as 1,8.")] = None,
    tokens: Annotated[int | None, typer.Option(help="Tokens to generate per sequence.")] = None,
    repeats: Annotated[int | None, typer.Option(help="Number of measured runs of each contender.")] = None,
    against: Annotated[str | None, typer.Option(help="With peers: contenders, such as sweep,llama.cpp [all].")] = None,
    seconds: Annotated[float | None, typer.Option(help="With peers: time limit of all runs [60].")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the results to this file.")] = None,
    **given: Any,
) -> None:
    """Measure the engine in this process. Each experiment has its own defaults.

    peers (default, two minutes): speed against full depth, and against the dense twin, also in llama.cpp if installed.
    A GGUF file is compared with llama.cpp on the same file. schedules: the speed-up of each schedule. profile: time per
    token by part.
    """
    from rich.console import Console

    from nvium_core.bench import harness
    from nvium_core.bench.figures import check_place, write_json
    from nvium_core.engine.device.processor import use_processor
    from nvium_core.engine.errors import require
    from nvium_core.training.caveats import warnings

    numbers = {"tokens": tokens, "repeats": repeats, "seconds": seconds}
    arguments: dict[str, Any] = {name: value for name, value in numbers.items() if value is not None}
    if sequences is not None:
        arguments["sequences"] = harness.counts(sequences, "sequences")
    if against is not None:
        arguments["against"] = tuple(against.split(","))
    module = import_module(f"nvium_core.bench.{experiment}")
    known = inspect.signature(module.measure).parameters
    for option, value in arguments.items():
        require(option in known, option, f"not an option of the experiment {experiment}")
        require(not isinstance(value, int) or value >= 1, option, f"must be at least 1, got {value}")
        require(not isinstance(value, float) or value > 0, option, f"must be above 0, got {value}")
    check_place(json_file)
    options = ModelOptions(**given)
    use_processor(options.instructions, options.threads)
    loading = options.device, options.dtype, options.weights, options.exits
    subject = harness.load_subject(model, shape, routing, loops, *loading)
    figures = {"experiment": experiment, **subject.as_dict(), **module.measure(subject, **arguments)}
    table = module.table(figures)
    remarks, table.title, table.caption = [*warnings(figures), table.caption or ""], figures["model"], None
    for column in table.columns:
        column.overflow = "fold"
    for remark in filter(None, remarks):
        Console().print(remark, soft_wrap=True, markup=False, highlight=False)
    Console().print(table)
    if json_file:
        write_json(figures, json_file)


@takes(ModelOptions)
def evaluate(
    data: Annotated[Path, typer.Option(help="Text in a format that `nvium train` reads.")],
    model: ModelArgument = None,
    twin: Annotated[str | None, typer.Option(help="A dense model to compare with.")] = None,
    thresholds: Annotated[
        str | None, typer.Option(help="Also evaluate sampling threshold at these, such as .3,.5,.9.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the results to this file.")] = None,
    **given: Any,
) -> None:
    """Measure perplexity (of π_mix, each exit and an oracle router) and routing."""
    from rich.console import Console

    from nvium_core import load_model
    from nvium_core.bench.figures import check_place, write_json
    from nvium_core.engine.device.processor import use_processor
    from nvium_core.evaluation import suite
    from nvium_core.evaluation.suite import report
    from nvium_core.training.data.texts import documents_of

    check_place(json_file)
    asked = suite.parse_thresholds(thresholds)
    documents = list(documents_of(data))
    options = ModelOptions(**given)
    use_processor(options.instructions, options.threads)
    device, dtype, exits = options.device, options.dtype, options.exits
    loaded = load_model(model, device, dtype, weights=options.weights, exits=exits)
    figures = suite.evaluate(
        loaded,
        documents,
        twin=load_model(twin, device, dtype) if twin else None,
        thresholds=asked,
    )
    figures["text"]["file"] = data.name
    Console().print(report(figures))
    if json_file:
        write_json(figures, json_file)
