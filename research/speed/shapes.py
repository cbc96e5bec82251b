"""Find the model size above which early exits are faster, with random weights and the paper's exit shares.

    python -m research.speed.shapes 12x256 24x256 --dtype bfloat16 --threads 1 --json shapes.json --draw shapes.png

The measure is the speed of one stream with `sweep` relative to `whole`. Each call adds its rows to the JSON file.
"""

import json
from pathlib import Path
from statistics import median
from typing import Annotated

import torch
import typer

from nvium_core.bench.contenders.contender import Contender
from nvium_core.bench.contenders.lineup import BASELINE, SWEEP, contender, engine_for, workloads
from nvium_core.bench.figures import Figures, write_json
from nvium_core.bench.harness import PROMPT_TOKENS, Subject, interleaved
from nvium_core.bench.shapes import PAPER_ROUTING, force_routing, random_weights, shape_config
from nvium_core.choices import Instructions, Precision, Weights
from nvium_core.engine.device.processor import use_processor
from nvium_core.loading import resolve_dtype
from nvium_core.model.stored import quantize_model
from research.plots import DOTS_PER_INCH, label, sheet


def main(
    shapes: Annotated[list[str] | None, typer.Argument(help="Layers x width, such as 24x256.")] = None,
    vocab: int = 8192,
    dtype: Precision = "float32",
    weights: Weights = "native",
    instructions: Instructions = "auto",
    threads: str = "1",
    tokens: int = 192,
    repeats: int = 9,
    json_file: Annotated[Path, typer.Option("--json")] = Path("shapes.json"),
    image: Annotated[Path | None, typer.Option("--draw", help="Draw all rows of the file.")] = None,
) -> None:
    """Measure the speed of one stream with `sweep` relative to `whole` on this CPU."""
    use_processor(instructions, threads)
    for shape in shapes or ():
        model = random_weights(shape_config(shape, vocab_size=vocab), dtype=resolve_dtype(dtype, torch.device("cpu")))
        force_routing(model, PAPER_ROUTING)
        quantize_model(model, weights)
        parameters = sum(weight.numel() for weight in model.parameters())
        subject = Subject(shape, model, list(range(1, PROMPT_TOKENS + 1)), weights)
        known = {**subject.as_dict(), "vocab": vocab, "parameters": parameters}
        row = {**known, **gain(subject, tokens, repeats)}
        rows = json.loads(json_file.read_text()) if json_file.exists() else []
        write_json([*rows, row], json_file)
        typer.echo(f"{shape} {row['dtype']} {weights} {row['instructions']} {threads}: {row['gain']:.2f}")
    if image:
        draw(json.loads(json_file.read_text()), image)


def gain(subject: Subject, tokens: int, repeats: int) -> Figures:
    """Return the median ratio of `sweep` to `whole`, and the ratio of each turn."""
    [workload] = workloads(subject, [1], tokens)
    engine = engine_for(subject.model, workload)
    contenders: dict[str, Contender] = {name: contender(engine, workload, name) for name in (SWEEP, BASELINE)}
    turns = interleaved(contenders, repeats, subject.name)
    sweep, whole = ([turn.tokens_per_second for turn in turns[name]] for name in (SWEEP, BASELINE))
    turn_gains = [mine / other for mine, other in zip(sweep, whole, strict=True)]
    return {"gain": median(turn_gains), "turns": turn_gains, "whole_tokens_per_second": median(whole)}


def draw(measured: list[Figures], image: Path) -> None:
    """Plot the speed-up over the number of parameters. Error bars are the quartiles of the turns."""
    rows = [row for row in measured if row["vocab"] == 8192]
    series: dict[tuple[str, int], list[Figures]] = {}
    for row in sorted(rows, key=lambda row: row["parameters"]):
        number = row["dtype"] if row["weights"] == "native" else row["weights"]
        series.setdefault((f"{number}, {row['instructions']}", row["threads"]), []).append(row)
    figure, panels = sheet({"model": "random weights", "dtype": "one stream", "device": "CPU"}, 2, share_y=True)
    for (name, threads), points in series.items():
        quartiles = [torch.tensor(row["turns"]).quantile(torch.tensor([0.25, 0.75])).tolist() for row in points]
        gains = [row["gain"] for row in points]
        errors = [
            [g - low for g, (low, _) in zip(gains, quartiles, strict=True)],
            [high - g for g, (_, high) in zip(gains, quartiles, strict=True)],
        ]
        millions = [row["parameters"] / 1e6 for row in points]
        panels[threads - 1].errorbar(millions, gains, errors, marker="o", capsize=2, label=name)
    for threads, panel in enumerate(panels, 1):
        panel.axhline(1, color="gray")
        label(panel, f"million parameters, {threads} thread{'s' * (threads > 1)}", "speed-up by early exits")
        panel.legend(loc="lower right", ncols=2, fontsize="small")
    figure.savefig(image, dpi=DOTS_PER_INCH)


if __name__ == "__main__":
    typer.run(main)
