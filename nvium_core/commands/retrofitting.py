"""`nvium retrofit`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from nvium_core.commands.options import show, takes
from nvium_core.training.options import RetrofitSettings


@takes(RetrofitSettings)
def retrofit(
    base: Annotated[str, typer.Argument(help="A Llama or relative: a folder, Hub name or GGUF file.")],
    target: Annotated[
        Path, typer.Argument(help="The folder to write the exits to; an interrupted retrofit in it is resumed.")
    ],
    **given: Any,
) -> None:
    """Train exits for a model and write them to a separate file. The model's weights do not change."""
    from nvium_core.loading import source_tokenizer
    from nvium_core.training.retrofitting.retrofit import retrofit as run
    from nvium_core.training.retrofitting.table import table

    settings = RetrofitSettings(source=base, target=target, **given)
    for kind, measured in run(settings, source_tokenizer(base)).items():
        show(table(measured, kind))
    print(f"Exits written to {target}. Use them with --exits: `nvium chat {base} --exits {target}`, or `nvium serve`.")
    print("By default, outputs follow the base model's distribution. `--sampling exits` lets tokens exit early, at the")
    print("cost in the table. `nvium convert` with --exits merges base and exits into one folder.")
