"""Draws the passes of a looped model's stream: which rows each pass carries through which loop.

    python docs/figures/loops.py docs/figures/loops.svg --seed 2

The default model has random weights, four loops, and gates that let tokens leave after each.
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from nvium_core import Engine, SamplingParams, load_model
from nvium_core.bench.shapes import force_routing, random_weights, shape_config
from nvium_core.model.nvium import Nvium

COLOURS = ("#c08418", "#2b8c8a", "#31559a", "#3f1d63", "#6d0a1e", "#94411c")
"""The playground's colours, from the first exit to the last."""

ROUTING = (0.35, 0.35, 0.2, 0.1)
CELL, GAP, LEFT, TOP = 34, 4, 78, 34
FONT = 'font-family="system-ui, sans-serif" font-size="13"'


class Cell(NamedTuple):
    """A row in a pass. `loop` counts from 0. `is_emitted`: the row's next token is sampled after this loop."""

    number: int
    loop: int
    row: int
    is_emitted: bool


def random_model() -> Nvium:
    model = random_weights(shape_config("4x64", len(ROUTING), 256, num_loops=len(ROUTING)), dtype=torch.float32)
    force_routing(model, ROUTING)
    return model


def exits_of(model: Nvium, num_tokens: int, seed: int) -> list[int]:
    """Return the exits of a stream whose prompt has one token."""
    params = SamplingParams(max_tokens=num_tokens, seed=seed, sampling="exits", ignore_eos=True)
    return Engine(model).generate([[1]], params)[0].exits


def cells(exits: Sequence[int], num_loops: int) -> Iterator[Cell]:
    """Yield what the tied passes of a lone stream carry, as in `Run.rows`."""
    filled = [0] * num_loops
    for front, exit_ in enumerate(exits):
        for loop in range(exit_):
            stops = [front + 1, *filled[:-1]]
            for block, (start, stop) in enumerate(zip(filled, stops, strict=True)):
                number = sum(exits[:front]) + loop
                rows = range(start, stop)
                yield from (Cell(number, block, row, row == front and block + 1 == exit_) for row in rows)
            filled = [max(each) for each in zip(filled, stops, strict=True)]


def drawn(exits: Sequence[int], num_loops: int) -> str:
    width, height = LEFT + CELL * sum(exits) + 20, TOP + CELL * num_loops + 62
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" {FONT} fill="#33353b">'
    axis = [text(8, middle(loop, num_loops), f"loop {loop + 1}") for loop in range(num_loops)]
    parts = [box(cell, exits[cell.row], num_loops) for cell in cells(exits, num_loops)]
    below = TOP + CELL * num_loops
    notes = [
        text(
            LEFT,
            20,
            f"{sum(exits)} passes over the weights for {len(exits)} tokens; all loops: {num_loops * len(exits)}",
        ),
        text(LEFT, below + 22, "Time runs to the right. A column is one pass. A number is the row of a token."),
        text(
            LEFT,
            below + 42,
            "Full colour: the loop after which the token leaves. Pale: rows on the way, or finishing later loops.",
        ),
    ]
    title = "<title>Passes of a looped model, each with rows of several loops</title>"
    ground = '<rect width="100%" height="100%" rx="8" fill="#fbfaf7"/>'
    return "\n".join([head, title, ground, *axis, *parts, *notes, "</svg>\n"])


def middle(loop: int, num_loops: int) -> int:
    return TOP + CELL * (num_loops - 1 - loop) + CELL // 2 + 5


def box(cell: Cell, exit_: int, num_loops: int) -> str:
    x, y = LEFT + CELL * cell.number, middle(cell.loop, num_loops)
    colour = COLOURS[(exit_ - 1) % len(COLOURS)]
    opacity, ink = ("1", "#ffffff") if cell.is_emitted else ("0.25", "#33353b")
    size = CELL - GAP
    frame = f'x="{x}" y="{y - CELL // 2 - 3}" width="{size}" height="{size}" rx="5"'
    label = f'<text x="{x + size / 2:g}" y="{y}" text-anchor="middle" fill="{ink}">{cell.row + 1}</text>'
    return f'<rect {frame} fill="{colour}" fill-opacity="{opacity}"/>{label}'


def text(x: int, y: int, content: str) -> str:
    return f'<text x="{x}" y="{y}">{content}</text>'


def main(arguments: Sequence[str] | None = None) -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("file", type=Path)
    options.add_argument("--model", help="a folder with a looped model [random weights]")
    options.add_argument("--tokens", type=int, default=10)
    options.add_argument("--seed", type=int, default=1)
    given = options.parse_args(arguments)
    model = load_model(given.model).model if given.model else random_model()
    exits = exits_of(model, given.tokens, given.seed)
    given.file.write_text(drawn(exits, model.config.num_exits), encoding="utf-8")


if __name__ == "__main__":
    main()
