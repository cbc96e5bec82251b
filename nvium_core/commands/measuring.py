"""How fast the engine is."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from nvium_core.bench import experiments
from nvium_core.bench.experiments import Experiment
from nvium_core.commands.options import takes
from nvium_core.options import ModelOptions


@takes(ModelOptions)
def bench(
    experiment: Annotated[Experiment, typer.Argument(help="What to measure.")] = "peers",
    model: Annotated[str | None, typer.Option(help="A folder, Hub name or GGUF file [the bundled model].")] = None,
    shape: Annotated[str | None, typer.Option(help="Random weights instead: layers x width, such as 24x768.")] = None,
    routing: Annotated[str | None, typer.Option(help="With --shape: p_1,p_2,… [the paper's].")] = None,
    sequences: Annotated[str | None, typer.Option(help="Sequences at once, one or several numbers.")] = None,
    tokens: Annotated[int | None, typer.Option(help="Tokens each of them generates.")] = None,
    repeats: Annotated[int | None, typer.Option(help="Turns that count; contenders alternate.")] = None,
    against: Annotated[
        str | None, typer.Option(help="With peers: who races, such as generate,llama.cpp [all].")
    ] = None,
    seconds: Annotated[float | None, typer.Option(help="With peers: when turns end, at the latest [60].")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here too.")] = None,
    **given: Any,
) -> None:
    """Measure the engine in this process. Options left out have the experiment's defaults.

    peers (default, two minutes): against itself with all layers and against the dense twin in transformers and
    llama.cpp, as far as installed. schedules: what early exits gain. sampling: what ways to sample cost, and what exits
    gain in each. profile: where a token's time goes.
    """
    from rich.console import Console

    from nvium_core.bench import harness
    from nvium_core.engine.device.processor import use_processor

    numbers = {"tokens": tokens, "repeats": repeats, "seconds": seconds}
    asked: dict[str, Any] = {name: value for name, value in numbers.items() if value is not None}
    if sequences is not None:
        asked["sequences"] = harness.counts(sequences, "sequences")
    if against is not None:
        asked["against"] = tuple(against.split(","))
    experiments.check(experiment, asked, json_file)
    options = ModelOptions(**given)
    use_processor(options.instructions, options.threads)
    loading = options.device, options.dtype, options.weights, options.exits
    subject = harness.load_subject(model, shape, routing, *loading)
    figures = experiments.measure(experiment, subject, asked)
    Console().print(experiments.table(figures))
    if json_file:
        json_file.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
