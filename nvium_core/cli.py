"""The `nvium` command: the one place that knows every part. Imports are made where they are used, so help is instant.

Whatever the user can get wrong ends as one line on stderr and exit code 2.
"""

import json
import sys
from dataclasses import asdict
from importlib.metadata import version as distribution_version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nvium_core.bench import experiments
from nvium_core.bench.experiments import Experiment
from nvium_core.choices import Device, Precision, Schedule, Sharding
from nvium_core.errors import NviumError

if TYPE_CHECKING:
    from rich.table import Table


USER_ERROR = 2

UsageError: type[Exception] = typer.BadParameter.__bases__[0]
"""The root of click's complaints; some versions of typer bring a click of their own, so it is reached from here."""

app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None, help="N-vium, served and trained.")

ModelArgument = Annotated[str | None, typer.Argument(help="A folder or Hub name; the embedded model if left out.")]
DeviceOption = Annotated[Device, typer.Option(help="auto is CUDA where there is one.")]
PrecisionOption = Annotated[Precision, typer.Option(help="auto is float32 on CPU, bfloat16 on CUDA.")]


def main() -> None:
    """Entry point: runs a command, and turns mistakes of the user into one line and exit code 2."""
    try:
        status = typer.main.get_command(app)(standalone_mode=False)
    except UsageError as error:
        fail(error.format_message())  # type: ignore[attr-defined]
    except (NviumError, OSError) as error:
        fail(str(error))
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    sys.exit(status if isinstance(status, int) else 0)


def fail(message: str) -> None:
    """One line on stderr, exit code 2."""
    print("nvium: " + " ".join(message.split()), file=sys.stderr)
    sys.exit(USER_ERROR)


def show_version(wanted: bool) -> None:
    if wanted:
        print(f"nvium {distribution_version('nvium')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", callback=show_version, is_eager=True, help="Print it.")] = False,
) -> None:
    """Serve, try, train and evaluate mixture-of-exits transformers."""


@app.command()
def serve(
    model: ModelArgument = None,
    model_aliases: Annotated[str | None, typer.Option(help="Its other names, comma separated.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on [127.0.0.1].")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on [8000].")] = None,
    device: Annotated[Device | None, typer.Option(help="auto is CUDA where there is one.")] = None,
    dtype: Annotated[Precision | None, typer.Option(help="auto is float32 on CPU, bfloat16 on CUDA.")] = None,
    schedule: Annotated[Schedule | None, typer.Option(help="Which block next [optimal].")] = None,
    deterministic: Annotated[
        bool | None, typer.Option("--deterministic", help="Same bits whatever else runs; slower.")
    ] = None,
    context: Annotated[int | None, typer.Option(help="Tokens of prompt and answer together [the model's].")] = None,
    max_sequences: Annotated[int | None, typer.Option(help="Sequences that run at once [32].")] = None,
    max_rows_per_step: Annotated[int | None, typer.Option(help="Rows of one step; cuts long prompts [256].")] = None,
    chunk_rows: Annotated[int | None, typer.Option(help="Rows of them for prompts while others speak [64].")] = None,
    max_wait_steps: Annotated[int | None, typer.Option(help="Steps a sequence may be passed over [64].")] = None,
    cache_memory: Annotated[
        str | None, typer.Option(help="For the key/value cache, such as 2GiB or 10% [what is needed, at most 25%].")
    ] = None,
    cache_tokens: Annotated[int | None, typer.Option(help="Or the positions it holds.")] = None,
    prefix_caching: Annotated[bool | None, typer.Option(help="Keep prompts' pages to be found again [on].")] = None,
    max_queue: Annotated[int | None, typer.Option(help="Choices that may wait [1024].")] = None,
    max_prompts: Annotated[int | None, typer.Option(help="Prompts of one request [1024].")] = None,
    max_n: Annotated[int | None, typer.Option(help="Choices per prompt [128].")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(help="Choices × max_tokens of one request.")] = None,
    max_body_bytes: Annotated[int | None, typer.Option(help="Size of a request's body [2,000,000].")] = None,
    api_keys: Annotated[
        str | None, typer.Option(help="KEY or NAME:KEY, comma separated; safer as NVIUM_API_KEYS or in a file.")
    ] = None,
    api_keys_file: Annotated[Path | None, typer.Option(help="The same, one a line, with # comments.")] = None,
    metrics_open: Annotated[bool | None, typer.Option(help="/metrics asks for no key [off].")] = None,
    requests_per_minute: Annotated[int | None, typer.Option(help="Of each key, or of all without one [any].")] = None,
    cors_origins: Annotated[str | None, typer.Option(help="Whose pages may call, comma separated [none].")] = None,
    otlp_endpoint: Annotated[str | None, typer.Option(help="OpenTelemetry collector that gets traces [none].")] = None,
    request_seconds: Annotated[float | None, typer.Option(help="How long a request may take [any time].")] = None,
    arrival_seconds: Annotated[float | None, typer.Option(help="How long a request may take to arrive [60].")] = None,
    slow_client_seconds: Annotated[float | None, typer.Option(help="How long a client may read nothing [60].")] = None,
    drain_seconds: Annotated[float | None, typer.Option(help="How long running requests may finish [30].")] = None,
    keep_alive_seconds: Annotated[float | None, typer.Option(help="Between comments on a silent stream [15].")] = None,
    stall_seconds: Annotated[float | None, typer.Option(help="Without a step, until /livez fails [30].")] = None,
) -> None:
    """Serve a model over HTTP. Every option may also be set as NVIUM_… in the environment."""
    given = {name: value for name, value in locals().items() if value is not None}
    from server.app import run
    from server.settings import read_settings

    run(read_settings(given))


@app.command()
def generate(
    model: ModelArgument = None,
    prompt: Annotated[str, typer.Option(help="The text to continue.")] = "Once upon a time",
    max_tokens: Annotated[int, typer.Option(help="At most so many tokens.")] = 128,
    seed: Annotated[int | None, typer.Option(help="Same seed, same text.")] = None,
    temperature: Annotated[float, typer.Option(help="0 is the argmax of π_mix.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="Nucleus sampling.")] = 1.0,
    schedule: Annotated[Schedule, typer.Option(help="Which block next.")] = "optimal",
    deterministic: Annotated[bool, typer.Option("--deterministic", help="Same bits on every run; slower.")] = False,
    device: DeviceOption = "auto",
    dtype: PrecisionOption = "auto",
) -> None:
    """Continue a prompt in the terminal, each token coloured by the exit it left at."""
    from rich.console import Console

    from nvium_core import Engine, EngineConfig, SamplingParams, load_model
    from nvium_core.terminal import stream_to

    loaded = load_model(model, device, dtype)
    engine = Engine(loaded.model, EngineConfig(schedule=schedule, deterministic=deterministic, max_sequences=1))
    params = SamplingParams(max_tokens=max_tokens, seed=seed, temperature=temperature, top_p=top_p)
    stream_to(Console(highlight=False), loaded, engine, prompt, params)


@app.command()
def train(
    recipe: Annotated[str, typer.Argument(help="One of `nvium recipes`; NAME-dense is the dense twin of NAME.")],
    data: Annotated[
        Path | None, typer.Option(help="UTF-8 text, plain or .xz, documents separated by <|endoftext|> lines.")
    ] = None,
    folder: Annotated[
        Path | None, typer.Option(help="The run's folder; resumed if it holds one. Default runs/RECIPE.")
    ] = None,
    settings: Annotated[list[str], typer.Option("--set", help="key=value, such as learning_rate.maximum=1e-3.")] = [],  # noqa: B006 (typer copies it)
    validation: Annotated[Path | None, typer.Option(help="Text to evaluate on now and then.")] = None,
    dense_log: Annotated[Path | None, typer.Option(help="log.jsonl of a dense run, for an adaptive β.")] = None,
    device: DeviceOption = "auto",
    compile: Annotated[bool, typer.Option(help="Compile the model; pays on long runs.")] = True,
    sharding: Annotated[Sharding, typer.Option(help="How processes share the model.")] = "ddp",
    rows_per_pass: Annotated[int, typer.Option(help="Tokens of one forward pass; bounds memory.", min=1)] = 16_384,
    checkpoint_activations: Annotated[
        bool, typer.Option("--checkpoint-activations", help="Compute them twice instead of keeping them.")
    ] = False,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Write its files beside log.jsonl.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what it would take, and train nothing.")] = False,
    flops_per_second: Annotated[
        float | None, typer.Option(help="With --dry-run: the device's, such as 4e14, instead of measuring.", min=1)
    ] = None,
) -> None:
    """Train a model; a run that was interrupted goes on from its last checkpoint.

    On several devices: torchrun --nproc-per-node N -m nvium_core.cli train …
    """
    from nvium_core.loading import resolve_device
    from nvium_core.training import dry_run as estimates
    from nvium_core.training.distributed import is_first_here
    from nvium_core.training.heap import keep_freed_memory
    from nvium_core.training.recipes.catalogue import recipe_named
    from nvium_core.training.train import RunOptions
    from nvium_core.training.train import train as run

    options = RunOptions(
        data=data or Path(),
        folder=folder or Path("runs") / recipe,
        validation=validation,
        dense_log=dense_log,
        device=str(resolve_device(device)),
        compile=compile,
        sharding=sharding,
        rows_per_pass=rows_per_pass,
        checkpoint_activations=checkpoint_activations,
        tensorboard=tensorboard,
    )
    chosen = recipe_named(recipe, settings)
    if dry_run:
        show(estimates.table(estimates.dry_run(chosen, options, flops_per_second)))
    elif data is None:
        raise typer.BadParameter("--data is missing")
    else:
        keep_freed_memory()
        written = run(chosen, options)
        if is_first_here():
            print(f"The model is in {written}")


@app.command()
def recipes(
    as_json: Annotated[bool, typer.Option("--json", help="As JSON, with more of each.")] = False,
) -> None:
    """List what `nvium train` can train: parameters, text, shape, exits."""
    from nvium_core.training.recipes import listing

    if as_json:
        print(json.dumps([asdict(line) for line in listing.entries()], indent=2))
    else:
        show(listing.table(listing.entries()))


@app.command()
def evaluate(
    data: Annotated[Path, typer.Option(help="UTF-8 text, plain or .xz, documents separated by <|endoftext|> lines.")],
    model: ModelArgument = None,
    greedy: Annotated[bool, typer.Option(help="Temperature 0 too: is it the argmax, how often does it leave.")] = False,
    temperatures: Annotated[bool, typer.Option("--temperatures", help="What temperature does to text.")] = False,
    twin: Annotated[str | None, typer.Option(help="A dense model's folder: its perplexity, and speed over it.")] = None,
    spec_bench: Annotated[Path | None, typer.Option(help="Spec-Bench's question.jsonl, to measure speed on.")] = None,
    prompts: Annotated[int | None, typer.Option(help="Of each of its categories [all].", min=1)] = None,
    tasks: Annotated[str | None, typer.Option(help="Tasks of lm_eval, comma separated.")] = None,
    tasks_folder: Annotated[Path | None, typer.Option(help="Where .yaml files describe further ones.")] = None,
    report: Annotated[Path | None, typer.Option(help="A folder for report.md, figures and coloured text.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here too.")] = None,
    device: DeviceOption = "auto",
    dtype: PrecisionOption = "auto",
) -> None:
    """Perplexity of π_mix, of each exit and of an oracle; routing, calibration, FLOPs; and what else is asked for."""
    from rich.console import Console
    from rich.markdown import Markdown

    from nvium_core import load_model
    from nvium_core.evaluation import suite
    from nvium_core.evaluation.report import markdown
    from nvium_core.training.data import read_documents

    suite.check_places(json_file, report)
    documents = read_documents(data)
    loaded = load_model(model, device, dtype)
    parts = suite.Parts(
        greedy=greedy,
        temperatures=temperatures,
        twin=load_model(twin, device, dtype) if twin else None,
        spec_bench=spec_bench,
        prompts_per_category=prompts,
        tasks=tasks.split(",") if tasks else (),
        tasks_folder=tasks_folder,
    )
    figures = suite.evaluate(loaded, documents, parts)
    Console().print(Markdown(markdown(figures)))
    if json_file:
        suite.write_json(figures, json_file)
    if report:
        suite.write_report(loaded, figures, documents, report)


@app.command()
def evaluate_chat(
    data: Annotated[Path, typer.Option(help="Stories to ask for, or a .jsonl of chats; see docs/chat.md.")],
    model: ModelArgument = None,
    conversations: Annotated[int, typer.Option(help="So many of them, spread over the text.", min=1)] = 100,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here too.")] = None,
    device: DeviceOption = "auto",
    dtype: PrecisionOption = "auto",
) -> None:
    """What written answers cost a model that was taught to chat, and whether its own come to an end."""
    from nvium_core import load_model
    from nvium_core.evaluation import chat, suite
    from nvium_core.evaluation.report import table

    suite.check_places(json_file, None)
    loaded = load_model(model, device, dtype)
    found = chat.evaluate_chat(loaded.model, chat.held_out(loaded, data, conversations), show_progress=True)
    figures = suite.description(loaded) | found.as_dict()
    print(table(["figure", "value"], figures.items()))
    if json_file:
        suite.write_json(figures, json_file)


@app.command()
def evaluate_baseline(
    model: Annotated[str, typer.Argument(help="The folder of a CALM*, or of LayerSkip, which is a Llama.")],
    twin: Annotated[str, typer.Option(help="The dense model's folder.")],
    data: Annotated[Path, typer.Option(help="UTF-8 text, plain or .xz, documents separated by <|endoftext|> lines.")],
    spec_bench: Annotated[Path | None, typer.Option(help="Spec-Bench's question.jsonl, to measure speed on.")] = None,
    prompts: Annotated[int | None, typer.Option(help="Of each of its categories [all].", min=1)] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the points here, for nvium compare.")] = None,
    device: DeviceOption = "auto",
    dtype: PrecisionOption = "auto",
) -> None:
    """Other methods' points of the quality-speed figure: CALM* at each threshold, LayerSkip with each draft."""
    from nvium_core import load_model
    from nvium_core.evaluation import baselines, comparison, suite
    from nvium_core.evaluation.spec_bench import read_prompts
    from nvium_core.training.data import read_documents

    suite.check_places(json_file, None)
    documents = read_documents(data)
    asked = read_prompts(spec_bench, prompts) if spec_bench else suite.openings(documents)
    loaded = baselines.load_baseline(model, device, dtype)
    points = baselines.evaluate_baseline(loaded, load_model(twin, device, dtype), documents, asked)
    print(comparison.markdown(points))
    if json_file:
        suite.write_json(points, json_file)


@app.command()
def compare(
    evaluations: Annotated[
        list[Path], typer.Argument(help="What `nvium evaluate --twin …` and `nvium evaluate-baseline` wrote by --json.")
    ],
    plot: Annotated[Path | None, typer.Option(help="Draw quality against speed, into a .png.")] = None,
    paper: Annotated[bool, typer.Option("--paper", help="Draw the paper's points too.")] = False,
) -> None:
    """Models beside one another: a Markdown table, and the quality-speed figure."""
    from nvium_core.evaluation import comparison

    found = comparison.read_evaluations(evaluations)
    print(comparison.markdown(found))
    if plot:
        comparison.draw(found, plot, with_paper=paper)


@app.command()
def convert(
    source: Annotated[str, typer.Argument(help="A folder or Hub name: our layout, the published one, or a Llama.")],
    target: Annotated[Path, typer.Argument(help="The folder to write; nothing may be in it yet.")],
    dtype: Annotated[Precision, typer.Option(help="auto keeps what is stored.")] = "auto",
) -> None:
    """Write a model of any layout as a folder of ours."""
    from nvium_core import conversion

    print(conversion.convert(source, target, dtype))


@app.command()
def bench(
    experiment: Annotated[Experiment, typer.Argument(help="What to measure.")] = "schedules",
    model: Annotated[str | None, typer.Option(help="A folder or Hub name; the embedded model if left out.")] = None,
    shape: Annotated[str | None, typer.Option(help="Random weights instead: layers x width, such as 24x768.")] = None,
    routing: Annotated[str | None, typer.Option(help="With --shape: p_1,p_2,… [the paper's].")] = None,
    sequences: Annotated[str | None, typer.Option(help="Sequences at once, one or several numbers.")] = None,
    tokens: Annotated[int | None, typer.Option(help="Tokens each of them generates.")] = None,
    repeats: Annotated[int | None, typer.Option(help="Turns that count; contenders alternate.")] = None,
    requests: Annotated[int | None, typer.Option(help="With determinism and soak: how many.")] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads; PyTorch's choice if left out.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here too.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw them, into a .png.")] = None,
    device: DeviceOption = "auto",
    dtype: PrecisionOption = "auto",
) -> None:
    """Measure the engine in this process. What is left out, the experiment chooses.

    schedules: tokens/s of each over synchronous, and as simulated; throughput: prompts included; memory: waste in the
    cache; prefix: first token with a known prefix; chunking: gaps when a long prompt arrives; logprobs: what they cost;
    determinism: what differs in company; soak: leaks; costs: a step's, for nvium plan; heads: the exits' losses in
    training, logits held or in chunks.
    """
    from rich.console import Console

    from nvium_core.bench import harness
    from nvium_core.bench.plan import counts

    options = {"tokens": tokens, "repeats": repeats, "requests": requests}
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    if sequences is not None:
        given["sequences"] = counts(sequences, "sequences")
    experiments.check(experiment, given, json_file, plot)
    harness.use_threads(threads)
    subject = harness.load_subject(model, shape, routing, device, dtype)
    figures = experiments.measure(experiment, subject, given)
    Console().print(experiments.table(figures))
    experiments.save(figures, json_file, plot)


@app.command()
def plan(
    routing: Annotated[str, typer.Option(help="Probability of each exit, p_1,p_2,…")] = ".146,.26,.345,.247",
    sequences: Annotated[str, typer.Option(help="Sequences at once, one or several numbers.")] = "1,2,4,8,16",
    fixed: Annotated[str | None, typer.Option(help="Milliseconds of a block, however few its rows [1].")] = None,
    per_row: Annotated[str | None, typer.Option(help="Milliseconds a block takes more for every row [0].")] = None,
    head: Annotated[float, typer.Option(help="Milliseconds of the head, per token.")] = 0.0,
    costs: Annotated[Path | None, typer.Option(help="Measured costs (JSON), instead of --fixed and --per-row.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here too.")] = None,
) -> None:
    """What each schedule would give, simulated: tokens per second, waits, and gaps between tokens. Needs no model.

    --fixed and --per-row take one number, or one for each block.
    """
    from rich.console import Console

    from nvium_core.bench import plan as planning

    loads = planning.loads(routing, sequences, fixed, per_row, head, costs)
    rows = planning.compare(loads)
    Console().print(planning.table(rows))
    if json_file:
        json_file.write_text(json.dumps(planning.as_dict(loads, rows), indent=2) + "\n", encoding="utf-8")


def show(table: "Table") -> None:
    from rich.console import Console

    Console().print(table)


if __name__ == "__main__":
    main()
