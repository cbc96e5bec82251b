"""Training a model, what can be trained, and models of other layouts."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from nvium_core.choices import Precision, Sharding
from nvium_core.commands.options import DeviceOption, show


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
    accept_changes: Annotated[
        bool, typer.Option("--accept-changes", help="Resume on another device, by other processes and so on.")
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
    from nvium_core.training.distributed import is_first_here
    from nvium_core.training.estimate import dry_run as estimates
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
        accept_changes=accept_changes,
    )
    chosen = recipe_named(recipe, settings)
    if flops_per_second and not dry_run:
        raise typer.BadParameter("--flops-per-second means nothing without --dry-run")
    if dry_run:
        show(estimates.table(estimates.dry_run(chosen, options, flops_per_second)))
    elif data is None:
        raise typer.BadParameter("--data is missing")
    else:
        keep_freed_memory()
        written = run(chosen, options)
        if is_first_here():
            print(f"The model is in {written}")


def recipes(
    as_json: Annotated[bool, typer.Option("--json", help="As JSON, with more of each.")] = False,
) -> None:
    """List what `nvium train` can train: parameters, text, shape, exits."""
    from nvium_core.training.recipes import listing

    if as_json:
        print(json.dumps([asdict(line) for line in listing.entries()], indent=2))
    else:
        show(listing.table(listing.entries()))


def convert(
    source: Annotated[str, typer.Argument(help="A folder or Hub name: our layout, the published one, or a Llama.")],
    target: Annotated[Path, typer.Argument(help="The folder to write; nothing may be in it yet.")],
    dtype: Annotated[Precision, typer.Option(help="auto keeps what is stored.")] = "auto",
) -> None:
    """Write a model of any layout as a folder of ours."""
    from nvium_core import conversion

    print(conversion.convert(source, target, dtype))
