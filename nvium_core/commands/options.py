"""Options that several commands have, and how they show a table."""

from typing import TYPE_CHECKING, Annotated

import typer

from nvium_core.choices import Device, Precision

if TYPE_CHECKING:
    from rich.table import Table

ModelArgument = Annotated[str | None, typer.Argument(help="A folder or Hub name; the embedded model if left out.")]
DeviceOption = Annotated[Device, typer.Option(help="auto is CUDA where there is one.")]
PrecisionOption = Annotated[Precision, typer.Option(help="auto is float32 on CPU, bfloat16 on CUDA.")]


def show(table: "Table") -> None:
    from rich.console import Console

    Console().print(table)
