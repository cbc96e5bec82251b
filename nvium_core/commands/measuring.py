"""How fast the engine is."""

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
    model: Annotated[str | None, typer.Option(help="A folder, Hub name or GGUF file [the embedded model].")] = None,
    shape: Annotated[
        str | None, typer.Option(help="Random weights instead: layers x width, such as 24x768, one or several.")
    ] = None,
    routing: Annotated[str | None, typer.Option(help="With --shape: p_1,p_2,… [the paper's].")] = None,
    sequences: Annotated[str | None, typer.Option(help="Sequences at once, one or several numbers.")] = None,
    tokens: Annotated[int | None, typer.Option(help="Tokens each of them generates.")] = None,
    repeats: Annotated[int | None, typer.Option(help="Turns that count; contenders alternate.")] = None,
    prompt_tokens: Annotated[str | None, typer.Option(help="Lengths, with prompts; from, to, with costs.")] = None,
    against: Annotated[
        str | None, typer.Option(help="With peers and prompts: who races, such as generate,llama.cpp [all].")
    ] = None,
    requests: Annotated[int | None, typer.Option(help="With determinism and costs: how many.")] = None,
    seconds: Annotated[float | None, typer.Option(help="With peers: when turns end, at the latest [60].")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here too.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw them, into a .png.")] = None,
    **given: Any,
) -> None:
    """Measure the engine in this process. The experiment chooses what is left out.

    peers, the default, two minutes: beside the dense twin in transformers and llama.cpp, as far as installed, the share
    of the possible gain, and what the machine can do; prompts: the same until the first token; schedules: tokens/s over
    synchronous, measured and simulated; throughput: prefill included; memory: unused cache; prefix: first token with a
    cached prefix; chunking: gaps while a long prompt is prefilled; logprobs: their cost; determinism: differences in a
    batch; costs: of a Step, for nvium plan; heads: the exits' losses in training, whole logits or chunks; profile:
    where a Step's time goes; host: overhead of the engine's Python; threads: numbers of them, and what is chosen;
    drafts: what exits gain where every token is the original's; exits: what they gain by depth where tokens leave;
    sampling: ways to sample over plain, and what exits gain in each.
    """
    from rich.console import Console

    from nvium_core.bench import harness
    from nvium_core.engine.device.processor import use_processor
    from nvium_core.planning.plan import counts

    numbers = {"tokens": tokens, "repeats": repeats, "requests": requests, "seconds": seconds}
    asked: dict[str, Any] = {name: value for name, value in numbers.items() if value is not None}
    for name, text in {"sequences": sequences, "prompt_tokens": prompt_tokens}.items():
        if text is not None:
            asked[name] = counts(text, name)
    if against is not None:
        asked["against"] = tuple(against.split(","))
    experiments.check(experiment, asked, json_file, plot, several="," in (shape or ""))
    options = ModelOptions(**given)
    use_processor(options.instructions, options.threads)
    runs = []
    for subject in harness.load_subjects(model, shape, routing, options.device, options.dtype, options.weights):
        runs.append(experiments.measure(experiment, subject, asked))
        Console().print(experiments.table(runs[-1]))
    experiments.save(runs, json_file, plot)
