"""The commands `tell`, `pack` and `ask`."""

import json
from functools import partial
from pathlib import Path
from random import Random
from typing import Annotated

import torch
import typer
from torch import nn

from nvium_core.errors import NviumError
from nvium_core.model.causal_lm import NviumForCausalLM
from nvium_core.text.folder_tokenizer import folder_tokenizer
from nvium_core.training.data.texts import documents_of
from research.tales.ask import training_lines
from research.tales.narrator import Narrator
from research.tales.pack import pack_tales
from research.tales.replay import pieces_of
from research.tales.tell import tell_tales

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.command()
def tell(
    model: Annotated[Path, typer.Argument(help="Folder of an instruction-tuned Llama.")],
    folder: Annotated[Path, typer.Argument(help="Folder of the shards.")],
    tales_per_shard: Annotated[int, typer.Option(help="Tales per shard, which are generated as a batch.", min=1)] = 128,
    first: Annotated[int, typer.Option(help="Number of the first shard.", min=0)] = 0,
    every: Annotated[int, typer.Option(help="Write every n-th shard only, so that n processes can share.", min=1)] = 1,
    device: str = "cpu",
) -> None:
    """Write tales until interrupted, starting with the first missing shard."""
    teller = NviumForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()
    nn.Module.to(teller, device)
    narrator = Narrator(teller, folder_tokenizer(model))
    tell_tales(narrator, folder, tales_per_shard, partial(typer.echo, err=True), first, every)


@app.command()
def pack(
    folder: Annotated[Path, typer.Argument(help="Folder of the shards.")],
    target: Annotated[Path, typer.Argument(help=".xz file to write, with counts in a .json file of the same name.")],
    words_from: Annotated[Path, typer.Option(help="Text, plain or .xz, whose frequent words tales may use.")],
    first: Annotated[int, typer.Option(help="Number of the first shard.", min=0)] = 0,
    last: Annotated[int | None, typer.Option(help="Number of the last shard [the highest].", min=0)] = None,
    after: Annotated[Path | None, typer.Option(help="Packed .xz to append the tales to; may be the target.")] = None,
    unlike: Annotated[
        list[Path] | None, typer.Option(help="Text whose near-duplicates are dropped; may be repeated.")
    ] = None,
) -> None:
    """Filter tales and write them as documents separated by lines <|endoftext|>."""
    try:
        typer.echo(pack_tales(folder, target, words_from, first=first, last=last, after=after, unlike=unlike or ()))
    except NviumError as error:
        raise typer.BadParameter(str(error)) from error


@app.command()
def ask(
    tales: Annotated[Path, typer.Argument(help="Text of tales, plain or .xz.")],
    target: Annotated[Path, typer.Argument(help=".jsonl to write, with conversations and plain texts.")],
    times: Annotated[int, typer.Option(help="Copies of each tale, each with other subjects.", min=1)] = 2,
    short_tales: Annotated[int, typer.Option(help="Short tales after each tale.", min=0)] = 2,
    new_names: Annotated[bool, typer.Option(help="Invent names even where the request does not name the hero.")] = True,
    other_text: Annotated[Path | None, typer.Option(help="Text, plain or .xz, whose pieces are mixed in.")] = None,
    other_share: Annotated[float, typer.Option(help="Share of these pieces in all characters.", min=0, max=0.9)] = 0.5,
    seed: int = 0,
) -> None:
    """Write questions answered by tales, and tales alone. Short tales made from plots follow each tale."""
    lines = [
        json.dumps({"text": line} if isinstance(line, str) else {"messages": line})
        for line in training_lines(list(documents_of(tales)), times, seed, short_tales=short_tales, new_names=new_names)
    ]
    if other_text:
        num_characters = round(sum(map(len, lines)) * other_share / (1 - other_share))
        pieces = pieces_of(list(documents_of(other_text)), num_characters, seed)
        lines += [json.dumps({"text": piece}) for piece in pieces]
        Random(seed).shuffle(lines)
    target.write_text("".join(line + "\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    app()
