"""The commands: `tell`, `pack`, `vary`, `ask` and `instruct`."""

import json
from functools import partial
from pathlib import Path
from random import Random
from typing import Annotated

import torch
import typer
from transformers import AutoTokenizer

from nvium_core.errors import NviumError
from nvium_core.model.causal_lm import NviumForCausalLM
from nvium_core.model.checkpoint import read_config
from nvium_core.training.chat.template import give_chat_template
from nvium_core.training.data.documents import Diet, read_documents
from research.tales.ask import asked
from research.tales.beside import pieces_of
from research.tales.instructions import instructions
from research.tales.narrator import Narrator
from research.tales.pack import SEPARATOR, pack_tales
from research.tales.tell import tell_tales
from research.tales.vary import varied

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.command()
def tell(
    model: Annotated[Path, typer.Argument(help="The folder of an instruction-tuned Llama.")],
    folder: Annotated[Path, typer.Argument(help="Where the shards are.")],
    tales_per_shard: Annotated[int, typer.Option(help="How many are told side by side.", min=1)] = 128,
    first: Annotated[int, typer.Option(help="The first shard.", min=0)] = 0,
) -> None:
    """Write tales until interrupted; continues when started again."""
    teller = NviumForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()
    narrator = Narrator(teller, AutoTokenizer.from_pretrained(model, trust_remote_code=False))
    tell_tales(narrator, folder, tales_per_shard, partial(typer.echo, err=True), first)


@app.command()
def pack(
    folder: Annotated[Path, typer.Argument(help="Where the shards are.")],
    target: Annotated[Path, typer.Argument(help="The .xz to write; its counts go beside it, as .json.")],
    words_from: Annotated[Path, typer.Option(help="Text, plain or .xz, whose frequent words a tale may use.")],
    first: Annotated[int, typer.Option(help="The first shard.", min=0)] = 0,
    last: Annotated[int | None, typer.Option(help="The last shard [that is there].", min=0)] = None,
    after: Annotated[
        Path | None, typer.Option(help="An .xz of this command, behind whose tales these are put; may be the target.")
    ] = None,
    unlike: Annotated[
        list[Path] | None, typer.Option(help="Documents of which no tale may be a near-duplicate; may be repeated.")
    ] = None,
) -> None:
    """Filter the tales and write them as documents between lines of <|endoftext|>."""
    try:
        typer.echo(pack_tales(folder, target, words_from, first=first, last=last, after=after, unlike=unlike or ()))
    except NviumError as error:
        raise typer.BadParameter(str(error)) from error


@app.command()
def vary(
    tales: Annotated[Path, typer.Argument(help="Documents between lines of <|endoftext|>, plain or .xz.")],
    target: Annotated[Path, typer.Argument(help="The text to write.")],
    times: Annotated[int, typer.Option(help="How often each tale is told; the first time as it is.", min=1)] = 4,
    seed: int = 0,
) -> None:
    """Write the tales several times, of heroes with other names and often about other things."""
    told = varied(read_documents(tales), times, seed)
    target.write_text(SEPARATOR.join(told) + "\n", encoding="utf-8")


@app.command()
def ask(
    tales: Annotated[Path, typer.Argument(help="Documents between lines of <|endoftext|>, plain or .xz.")],
    target: Annotated[Path, typer.Argument(help="The .jsonl to write: conversations and plain texts.")],
    times: Annotated[int, typer.Option(help="How often each tale is told, of others every time.", min=1)] = 2,
    beside: Annotated[Path | None, typer.Option(help="A text, plain or .xz, of which pieces stand among them.")] = None,
    beside_share: Annotated[float, typer.Option(help="What these pieces are of all characters.", min=0, max=0.9)] = 0.5,
    seed: int = 0,
) -> None:
    """Write tales and questions that they answer: each tale told of others, with two short ones behind it."""
    lines = [
        json.dumps({"text": line} if isinstance(line, str) else {"messages": line})
        for line in asked(read_documents(tales), times, seed)
    ]
    if beside:
        num_characters = round(sum(map(len, lines)) * beside_share / (1 - beside_share))
        pieces = pieces_of(read_documents(beside), num_characters, seed)
        lines += [json.dumps({"text": piece}) for piece in pieces]
        Random(seed).shuffle(lines)
    target.write_text("".join(line + "\n" for line in lines), encoding="utf-8")


@app.command()
def instruct(
    tales: Annotated[Path, typer.Argument(help="Documents between lines of <|endoftext|>, plain or .xz.")],
    target: Annotated[Path, typer.Argument(help="The .jsonl to write: conversations.")],
    model: Annotated[Path, typer.Option(help="The model to be tuned; its tokenizer and context bound the answers.")],
    times: Annotated[float, typer.Option(help="How often each tale is asked for, on average.", min=0.01)] = 2.0,
    seed: int = 0,
) -> None:
    """Write questions and the tales that answer them, a long tale in several turns."""
    tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    give_chat_template(tokenizer)
    context = read_config(model).max_position_embeddings
    diet = Diet(simple_epochs=times, other_epochs=times)
    made = instructions(read_documents(tales), diet, tokenizer, context, seed)
    target.write_text("".join(json.dumps({"messages": said}) + "\n" for said in made), encoding="utf-8")


if __name__ == "__main__":
    app()
