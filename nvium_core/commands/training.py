"""`nvium train`, `nvium plot`, `nvium recipes`, `nvium convert` and `nvium retrofit`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from nvium_core.choices import Precision
from nvium_core.commands.options import DeviceOption, takes
from nvium_core.options import RetrofitSettings, RunOptions


@takes(RunOptions)
def train(
    recipe: Annotated[str, typer.Argument(help="One of `nvium recipes`; NAME-dense is the dense twin of NAME.")],
    data: Annotated[
        Path,
        typer.Option(help="Text, plain or .xz, with <|endoftext|> lines between documents."),
    ],
    folder: Annotated[Path | None, typer.Option(help="Folder of the run; resumes a run in it [runs/RECIPE].")] = None,
    settings: Annotated[
        list[str], typer.Option("--set", help="Override a setting: key=value, such as learning_rate.maximum=1e-3.")
    ] = [],  # noqa: B006 (typer copies it)
    seeds: Annotated[
        str | None, typer.Option(help="Train once per seed, such as 1,2,3, and print the mean and spread.")
    ] = None,
    device: DeviceOption = "auto",
    compile: Annotated[bool, typer.Option(help="Compile the model: slow to start, faster on long runs.")] = True,
    **given: Any,
) -> None:
    """Train a model. An interrupted run continues from its last checkpoint."""
    from rich.console import Console

    from nvium_core.loading import resolve_device
    from nvium_core.training.recipes.catalogue import recipe_named
    from nvium_core.training.train import train as run
    from nvium_core.training.train import train_seeds

    options = RunOptions(
        data=data, folder=folder or Path("runs") / recipe, device=str(resolve_device(device)), compile=compile, **given
    )
    if seeds:
        recipes = {seed: recipe_named(recipe, [*settings, f"seed={seed}"]) for seed in parsed_seeds(seeds)}
        Console().print(train_seeds(recipes, options))
    else:
        print(f"Model written to {run(recipe_named(recipe, settings), options)}")


def parsed_seeds(text: str) -> list[int]:
    try:
        seeds = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise typer.BadParameter(f"--seeds: must be integers such as 1,2,3, got {text!r}") from error
    if len({*seeds}) < len(seeds):
        raise typer.BadParameter(f"--seeds: must be different, because equal seeds train equal models; got {text!r}")
    return seeds


def plot(
    run: Annotated[Path, typer.Argument(help="Folder of a training run, also of one that has not ended.")],
    out: Annotated[Path | None, typer.Option(help="File to write, such as run.png [RUN/log.svg].")] = None,
) -> None:
    """Draw a run's log: losses, exit shares and mean depth. Requires nvium[research]."""
    from nvium_core.training.loggers import plot as draw

    file = out or run / "log.svg"
    draw(run, file)
    print(f"Figure written to {file}")


def recipes() -> None:
    """List the recipes of `nvium train` with parameters, training tokens, shape and exits."""
    from rich.console import Console

    from nvium_core.training.recipes import catalogue

    Console().print(catalogue.table())


def convert(
    source: Annotated[
        str,
        typer.Argument(help="A folder, Hub name or GGUF file: our layout, the published one, or a Llama or relative."),
    ],
    target: Annotated[Path, typer.Argument(help="The folder to write; must be empty or missing.")],
    dtype: Annotated[Precision, typer.Option(help="Precision of the weights; auto keeps the stored one.")] = "auto",
    exits: Annotated[str | None, typer.Option(help="Folder or Hub name of retrofitted exits to merge in.")] = None,
) -> None:
    """Convert a model to a folder in our layout."""
    from nvium_core import conversion

    print(conversion.convert(source, target, dtype, exits=exits))


@takes(RetrofitSettings)
def retrofit(
    base: Annotated[str, typer.Argument(help="A Llama or relative: a folder, Hub name or GGUF file.")],
    target: Annotated[
        Path, typer.Argument(help="The folder to write the exits to; an interrupted retrofit in it is resumed.")
    ],
    **given: Any,
) -> None:
    """Train exits for a model and write them to a separate file. The model's weights do not change."""
    from rich.console import Console

    from nvium_core.loading import source_tokenizer
    from nvium_core.training.retrofitting.retrofit import retrofit as run
    from nvium_core.training.retrofitting.run import table

    settings = RetrofitSettings(source=base, target=target, **given)
    for kind, measured in run(settings, source_tokenizer(base)).items():
        Console().print(table(measured, kind))
    print(f"Exits written to {target}. Use them with --exits: `nvium chat {base} --exits {target}`, or `nvium serve`.")
    print("By default, outputs follow the base model's distribution. `--sampling exits` lets tokens exit early, at the")
    print("cost in the table. `nvium convert` with --exits merges base and exits into one folder.")
