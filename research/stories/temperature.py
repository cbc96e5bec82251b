"""Compare text sampled with `exits` and `mixture` at several temperatures with human text.

The model continues openings of documents. The continuations are compared with the documents' own continuations.

    python -m research.stories.temperature MODEL --data valid.txt.xz
"""

import itertools
from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import track

from nvium_core.bench.figures import write_json
from nvium_core.bench.harness import timed
from nvium_core.choices import Sampling
from nvium_core.engine.engine import Engine
from nvium_core.engine.params import EngineConfig, SamplingParams
from nvium_core.evaluation.predictions import EvaluationError, document_tokens
from nvium_core.evaluation.suite import description
from nvium_core.loading import LoadedModel, load_model
from nvium_core.training.data.corpus import read_documents
from research.markdown import table
from research.stories.text_quality import Continuation, Quality, exit_frequencies, judge, quality

TEMPERATURES = (0.5, 0.7, 1.0)
NUM_TEXTS, TOKENS_PER_TEXT = 32, 256
PROMPT_TOKENS = 32

Row = dict[str, Any]

MODES: tuple[Sampling, ...] = "exits", "mixture"


def measure(
    loaded: LoadedModel, originals: Sequence[Continuation], temperatures: Sequence[float] = TEMPERATURES
) -> dict[str, Any]:
    """Continue the openings at every temperature and sampling mode, with one seed per text.

    In the result, `people` is the `Quality` of the documents' own continuations. `rows` have a `Quality` for each
    setting and, with early exits, the `ExitFrequencies`. `advice` summarises them.
    """
    engine = Engine(loaded.model, EngineConfig(schedule="sweep", prefix_caching=False))
    settings = [SamplingParams(sampling=s, temperature=t) for s, t in itertools.product(MODES, temperatures)]
    rows = [
        row(loaded, continued(engine, originals, params), params)
        for params in track(settings, "temperatures", transient=True)
    ]
    plain = SamplingParams()
    people = quality(loaded.tokenizer, originals, [judge(loaded.model, text, plain) for text in originals])
    return {
        "num_texts": len(originals),
        "prompt_tokens": len(originals[0].prompt),
        "tokens_per_text": len(originals[0].token_ids),
        "people": asdict(people),
        "rows": rows,
        "advice": advice(people, rows),
    }


def openings(
    loaded: LoadedModel,
    documents: Sequence[str],
    num_texts: int = NUM_TEXTS,
    num_tokens: int = TOKENS_PER_TEXT,
) -> list[Continuation]:
    """Select openings evenly from the documents that are long enough, each with the text that follows.

    An opening takes at most a quarter of the context, and its continuation at most the rest. Raise `EvaluationError` if
    no document is long enough.
    """
    context = loaded.model.config.max_position_embeddings
    num_begun = min(PROMPT_TOKENS, max(1, context // 4))
    length = min(num_begun + num_tokens, context)
    encoded = (document_tokens(loaded.tokenizer, document)[:-1] for document in documents)
    long_enough = [token_ids for token_ids in encoded if len(token_ids) >= length]
    if not long_enough:
        raise EvaluationError(f"temperatures: no document of the text has at least {length} tokens")
    number = min(num_texts, len(long_enough))
    chosen = [long_enough[n * len(long_enough) // number] for n in range(number)]
    return [Continuation(token_ids[:num_begun], token_ids[num_begun:length], []) for token_ids in chosen]


def continued(engine: Engine, originals: Sequence[Continuation], params: SamplingParams) -> list[Continuation]:
    """Continue the openings with the model, each to the length of the document's own continuation."""
    requests = [
        (text.prompt, replace(params, max_tokens=len(text.token_ids), seed=seed, ignore_eos=True))
        for seed, text in enumerate(originals)
    ]
    run = timed(engine, requests)
    answers = zip(originals, run.token_ids, run.exits, strict=True)
    return [Continuation(text.prompt, token_ids, exits) for text, token_ids, exits in answers]


def row(loaded: LoadedModel, texts: Sequence[Continuation], params: SamplingParams) -> Row:
    """Return all results of one setting."""
    judgements = [judge(loaded.model, text, params) for text in texts]
    figures: Row = {"sampling": params.sampling, "temperature": params.temperature}
    figures |= asdict(quality(loaded.tokenizer, texts, judgements))
    if params.sampling == "exits":
        figures |= asdict(exit_frequencies(loaded.model.config.exit_layers or [], texts, judgements))
    return figures


def advice(people: Quality, rows: Sequence[Row]) -> str:
    """Report at which temperature `exits` has as many distinct words as human text, and how many 4-grams repeat."""
    early = [row for row in rows if row["sampling"] == "exits"]
    alike = temperature_where("distinct_words", people.distinct_words, early)
    repeated = [f"{row['repeated_grams']:.1%} at {row['temperature']:g}" for row in early]
    return (
        f"Human text has {people.distinct_words:.0%} distinct words. With early exits, the share is the same at "
        f"temperature {alike}. Repeated 4-grams with early exits: {', '.join(repeated)}; in human text: "
        f"{people.repeated_grams:.1%}. {equivalents(early, [row for row in rows if row not in early])}"
    )


def equivalents(early: Sequence[Row], mixture: Sequence[Row]) -> str:
    """Report the temperatures at which tokens of `mixture` are as probable as tokens of `exits`."""
    others = [row for row in early if row["temperature"] != 1]
    pairs = [
        f"exits {row['temperature']:g} and mixture {temperature_where('mean_logprob', row['mean_logprob'], mixture)}"
        for row in others
    ]
    return f"At these temperatures, tokens are equally probable: {'; '.join(pairs)}." if pairs else ""


def temperature_where(name: str, value: float, rows: Sequence[Row]) -> str:
    """Interpolate the temperature at which a figure reaches a value."""
    values, temperatures = zip(*sorted((row[name], row["temperature"]) for row in rows), strict=True)
    if values[0] <= value <= values[-1]:
        return f"{np.interp(value, values, temperatures):.2f}"
    nearest = temperatures[0 if value < values[0] else -1]
    return f"{'less' if nearest == min(temperatures) else 'more'} than {nearest:g}"


def as_markdown(found: dict[str, Any]) -> str:
    """Format a row per setting, human text first."""
    columns = ["", "temperature", "mean log π_mix", "entropy", "repeated 4-grams", "distinct words", "mean depth"]
    names = ("mean_logprob", "entropy", "repeated_grams", "distinct_words")
    rows: list[list[object]] = [["people", None, *(found["people"][name] for name in names), None]]
    rows += [
        [each["sampling"], each["temperature"], *(each[name] for name in names), each.get("mean_depth")]
        for each in found["rows"]
    ]
    return f"{table(columns, rows)}\n\n{found['advice']}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(prog="python -m research.stories.temperature", description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", help="folder or Hub name [the bundled model]")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(arguments)
    loaded = load_model(args.model, "cpu")
    found = measure(loaded, openings(loaded, read_documents(args.data)))
    print(as_markdown(found))
    if args.json:
        write_json(description(loaded) | {"temperatures": found}, args.json)


if __name__ == "__main__":
    main()
