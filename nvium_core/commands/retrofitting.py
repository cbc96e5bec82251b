"""`nvium retrofit`."""

from pathlib import Path
from typing import Annotated

import typer

from nvium_core.choices import Lesson
from nvium_core.commands.options import show


def retrofit(
    base: Annotated[str, typer.Argument(help="A plain Llama or relative: a folder, Hub name or GGUF file.")],
    target: Annotated[Path, typer.Argument(help="The folder for its exits; an interrupted retrofit there is resumed.")],
    data: Annotated[
        Path | None,
        typer.Option(help="Text as `nvium train` reads it, or a .jsonl of conversations. [the model's own]"),
    ] = None,
    self_talk: Annotated[
        int | None,
        typer.Option(help="Tokens that the model writes itself. [without data a third of --tokens]", min=0),
    ] = None,
    exits: Annotated[str, typer.Option(help="Their number, or the layers they stand after: 12,18,24.")] = "4",
    tokens: Annotated[int, typer.Option(help="Tokens to train on; a shorter text is repeated.", min=1)] = (1_000_000),
    depth: Annotated[float, typer.Option(help="Mean depth to train routers for, a share of the layers.")] = 0.9,
    exits_learn: Annotated[
        Lesson,
        typer.Option(help="What early exits learn: the base's distribution (original), or the text of --data too."),
    ] = "original",
) -> None:
    """Train exits for a model, as a separate file; the model's own weights do not change."""
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
    print(f"The exits are in {target}: `nvium chat {base} --exits {target}`, `nvium serve {base} --exits {target}`.")
    print(
        "By default the model samples its own text as before. `--sampling exits` lets tokens leave early, at the price"
    )
    print("that the table shows; `nvium convert` with --exits merges both into one folder.")
