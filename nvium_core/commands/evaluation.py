"""`nvium evaluate`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from nvium_core.commands.options import ModelArgument, takes
from nvium_core.options import ModelOptions


@takes(ModelOptions)
def evaluate(
    data: Annotated[Path, typer.Option(help="Text in a format that `nvium train` reads.")],
    model: ModelArgument = None,
    twin: Annotated[str | None, typer.Option(help="A dense model to compare with.")] = None,
    works: Annotated[
        Path | None,
        typer.Option(help="File with the name of each document's work, one per line. Intervals then resample works."),
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the results to this file.")] = None,
    **given: Any,
) -> None:
    """Measure perplexity (of π_mix, each exit and an oracle router), routing and FLOPs."""
    from rich.console import Console

    from nvium_core import load_model
    from nvium_core.bench.figures import check_place, write_json
    from nvium_core.engine.device.processor import use_processor
    from nvium_core.evaluation import suite
    from nvium_core.evaluation.report import report
    from nvium_core.training.data.corpus import documents_of

    check_place(json_file)
    documents = list(documents_of(data))
    options = ModelOptions(**given)
    use_processor(options.instructions, options.threads)
    device, dtype, exits = options.device, options.dtype, options.exits
    loaded = load_model(model, device, dtype, weights=options.weights, exits=exits)
    is_rounded = options.weights in ("q8", "q4")
    figures = suite.evaluate(
        loaded,
        documents,
        works=works.read_text(encoding="utf-8").splitlines() if works else None,
        unrounded=load_model(model, device, dtype, weights="native", exits=exits) if is_rounded else None,
        twin=load_model(twin, device, dtype) if twin else None,
    )
    figures["text"]["file"] = data.name
    Console().print(report(figures))
    if json_file:
        write_json(figures, json_file)
