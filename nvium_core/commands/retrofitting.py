"""`nvium retrofit`."""

from pathlib import Path
from typing import Annotated

import typer

from nvium_core.choices import Backbone, Lesson
from nvium_core.commands.options import show


def retrofit(
    source: Annotated[str, typer.Argument(help="A plain Llama or relative: a folder, Hub name or GGUF file.")],
    target: Annotated[Path, typer.Argument(help="The folder to write; an interrupted retrofit there is resumed.")],
    data: Annotated[
        Path | None,
        typer.Option(help="Text as `nvium train` reads it, or a .jsonl of conversations. [the model's own]"),
    ] = None,
    self_talk: Annotated[
        int | None,
        typer.Option(help="Tokens of its own writing. [without data a third of --tokens]", min=0),
    ] = None,
    exits: Annotated[str, typer.Option(help="Their number, or the layers they stand after: 12,18,24.")] = "4",
    tokens: Annotated[int, typer.Option(help="Tokens to train on; a shorter text is repeated.", min=1)] = (1_000_000),
    depth: Annotated[float, typer.Option(help="Mean depth to train routers for, a share of the layers.")] = 0.9,
    exits_learn: Annotated[
        Lesson, typer.Option(help="What early exits learn to say: what the `original` says, or the given `text` too.")
    ] = "original",
    backbone: Annotated[
        Backbone, typer.Option(help="`low-rank` trains the model's own layers too, which makes it another model.")
    ] = "frozen",
    rank: Annotated[int | None, typer.Option(help="Rank of a low-rank backbone's updates. [16]", min=1)] = None,
    accept_changes: Annotated[
        bool, typer.Option("--accept-changes", help="Resume on another machine or PyTorch.")
    ] = False,
) -> None:
    """Give a model exits, which learn to say what it says. Unless asked, its own weights stay as they are."""
    from nvium_core.loading import source_tokenizer
    from nvium_core.training.heap import keep_freed_memory
    from nvium_core.training.retrofitting.retrofit import retrofit as run
    from nvium_core.training.retrofitting.settings import RetrofitSettings
    from nvium_core.training.retrofitting.table import table

    keep_freed_memory()
    settings = RetrofitSettings(
        source=source,
        target=target,
        data=data,
        self_talk=self_talk,
        exits=exits,
        tokens=tokens,
        depth=depth,
        exits_learn=exits_learn,
        backbone=backbone,
        rank=rank,
    )
    for kind, measured in run(settings, source_tokenizer(source), accept_changes=accept_changes).items():
        show(table(measured, kind))
    print(f"The model is in {target}, for `nvium chat {target}` and `nvium serve {target}`.")
    if backbone == "frozen":
        print(
            "Its text is the original's, drafted and verified. With `--sampling exits` tokens leave early, and it is of"
        )
        print("the mixture, whose perplexity the table has beside the price over the original's.")
    else:
        print(f"Its layers are no longer those of {source}: by default tokens leave early, and no sampling gives the")
        print("text of the original; `original` is this model's own last exit.")
