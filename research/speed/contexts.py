"""Measure reading a long prompt and decoding behind it, by the precision of the KV cache.

    python -m research.speed.contexts --model MODEL --prompts 512,2048,8000 --json contexts.json

One stream. The precisions take turns, and every ratio is to the first one.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from nvium_core.bench.contenders.contender import Contender, Generation
from nvium_core.bench.figures import Figures, write_json
from nvium_core.bench.harness import Subject, count, interleaved, load_subject, ratio, spread, timed
from nvium_core.choices import CachePrecision, Instructions, Weights
from nvium_core.engine.config import EngineConfig
from nvium_core.engine.device.processor import use_processor
from nvium_core.engine.engine import Engine
from nvium_core.engine.errors import require
from nvium_core.engine.sampling_params import SamplingParams

PRECISIONS: tuple[CachePrecision, ...] = "float32", "float16", "bfloat16"


def measure(subject: Subject, prompts: Sequence[int], tokens: int, repeats: int) -> Figures:
    """Measure prompts of these lengths, each followed by `tokens` tokens."""
    require(max(prompts) + tokens <= subject.context, "prompts", f"must leave {tokens} tokens of the context")
    return {"tokens": tokens, "repeats": repeats, "rows": [row(subject, each, tokens, repeats) for each in prompts]}


def row(subject: Subject, length: int, tokens: int, repeats: int) -> Figures:
    prompt = [subject.prompt[place % len(subject.prompt)] for place in range(length)]
    params = SamplingParams(max_tokens=tokens + 1, ignore_eos=True)
    config = EngineConfig(max_sequences=1, prefix_caching=False, cache_tokens=length + 2 * tokens)
    contenders: dict[str, Contender] = {}
    for precision in PRECISIONS:
        engine = Engine(subject.model, replace(config, cache_dtype=precision))
        contenders[precision] = partial(read, engine, prompt, params)
    turns = interleaved(contenders, repeats, count(length, "token"))
    figures = {name: rates(taken, length, tokens) for name, taken in turns.items()}
    first = figures[PRECISIONS[0]]
    compared = {
        name: {"turns": seen}
        | {f"{work}_tokens_per_second": median(values) for work, values in seen.items()}
        | {key: value for work in seen for key, value in ratio(f"{work}_over", seen[work], first[work]).items()}
        for name, seen in figures.items()
    }
    return {"prompt": length, "precisions": compared}


def read(engine: Engine, prompt: list[int], params: SamplingParams, turn: int) -> Generation:
    """Read the prompt and decode. No other turn has the same seed."""
    return timed(engine, [(prompt, replace(params, seed=turn))])


def rates(turns: Sequence[Generation], length: int, tokens: int) -> dict[str, list[float]]:
    """Return tokens per second of prompts and of decoding, by turn."""
    waits = [turn.first_token_seconds[0] for turn in turns]
    decoded = [tokens / (turn.seconds - wait) for turn, wait in zip(turns, waits, strict=True)]
    return {"prompt": [length / wait for wait in waits], "decode": decoded}


def table(figures: Figures) -> Table:
    result = Table("prompt", "cache", "prompt tokens/s", "ratio", "decoded tokens/s", "ratio")
    for each in figures["rows"]:
        for precision, seen in each["precisions"].items():
            columns = [
                text
                for work in ("prompt", "decode")
                for text in (f"{seen[f'{work}_tokens_per_second']:.4g}", spread(f"{work}_over", seen))
            ]
            result.add_row(str(each["prompt"]), precision, *columns)
    return result


def main(
    model: Annotated[str | None, typer.Option(help="A folder, Hub name or GGUF file [the bundled model].")] = None,
    prompts: str = "512,2048,8000",
    tokens: Annotated[int, typer.Option(help="Tokens to decode behind each prompt.")] = 32,
    repeats: int = 3,
    weights: Weights = "auto",
    instructions: Instructions = "auto",
    threads: str = "auto",
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the results to this file.")] = None,
) -> None:
    """Measure reading a long prompt and decoding behind it, by the precision of the KV cache."""
    use_processor(instructions, threads)
    subject = load_subject(model, None, None, None, "cpu", "float32", weights)
    figures = measure(subject, tuple(map(int, prompts.split(","))), tokens, repeats)
    Console().print(table(figures))
    if json_file:
        write_json({"n": repeats, "spread": "turns", **subject.as_dict(), **figures}, json_file)


if __name__ == "__main__":
    typer.run(main)
