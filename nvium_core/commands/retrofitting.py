"""`nvium retrofit`."""

from pathlib import Path
from typing import Annotated

import typer

from nvium_core.choices import ExitTarget
from nvium_core.commands.options import show


def retrofit(
    base: Annotated[str, typer.Argument(help="A Llama or relative: a folder, Hub name or GGUF file.")],
    target: Annotated[
        Path, typer.Argument(help="The folder to write the exits to; an interrupted retrofit in it is resumed.")
    ],
    data: Annotated[
        Path | None,
        typer.Option(
            help="Text in a format that `nvium train` reads, or a .jsonl of conversations "
            "[text that the model generates]."
        ),
    ] = None,
    self_talk: Annotated[
        int | None,
        typer.Option(
            help="Training tokens that the model generates itself [without --data a third of --tokens].", min=0
        ),
    ] = None,
    exits: Annotated[str, typer.Option(help="Number of exits, or their layers, such as 12,18,24.")] = "4",
    tokens: Annotated[
        int, typer.Option(help="Number of training tokens; a shorter text is repeated.", min=1)
    ] = 1_000_000,
    depth: Annotated[
        float, typer.Option(help="Mean depth that the routers are trained for, as a share of all layers.")
    ] = 0.9,
    exits_learn: Annotated[
        ExitTarget,
        typer.Option(help="Training target of early exits: the base's distribution (original), or also --data (text)."),
    ] = "original",
) -> None:
    """Train exits for a model and write them to a separate file. The model's weights do not change."""
    from nvium_core.loading import source_tokenizer
    from nvium_core.training.heap import keep_freed_memory
    from nvium_core.training.retrofitting.retrofit import retrofit as run
    from nvium_core.training.retrofitting.settings import RetrofitSettings
    from nvium_core.training.retrofitting.table import table

    keep_freed_memory()
    settings = RetrofitSettings(
        source=base,
        target=target,
        data=data,
        self_talk=self_talk,
        exits=exits,
        tokens=tokens,
        depth=depth,
        exits_learn=exits_learn,
    )
    for kind, measured in run(settings, source_tokenizer(base)).items():
        show(table(measured, kind))
    print(f"Exits written to {target}. Use them with --exits: `nvium chat {base} --exits {target}`, or `nvium serve`.")
    print("By default, outputs follow the base model's distribution. `--sampling exits` lets tokens exit early, at the")
    print("cost in the table. `nvium convert` with --exits merges base and exits into one folder.")
