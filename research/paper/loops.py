"""Compare a looped N-vium with an untied one and with dense models: perplexity, exits, speed and memory.

    python -m research.paper.loops --data train.txt.xz --validation valid.txt.xz --json loops.json

A token of the first three models passes 16 layers of width 128. `looped` runs four layers four times, `nvium` and
`dense-16` have 16 layers, `dense-4` has the four layers of `looped` and runs them once. All models of a seed read the
same windows in the same order. Interrupted runs resume. The speed is that of the first seed: sampling at temperature 1
by the exits, models in turns. A model's memory is the peak of a process that only loads it and generates eight texts.
"""

import resource
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import product
from multiprocessing import get_context
from pathlib import Path

from nvium_core.bench.contenders.lineup import contender, engine_for, workloads
from nvium_core.bench.figures import Figures, write_json
from nvium_core.bench.harness import Subject, count, interleaved, ratio, subject_of
from nvium_core.bench.peers import rates, shares, summary
from nvium_core.engine.device.memory import page_bytes
from nvium_core.engine.device.processor import use_processor
from nvium_core.evaluation.perplexity import evaluate
from nvium_core.evaluation.suite import description, perplexity_gain
from nvium_core.loading import load_model
from nvium_core.model.checkpoint import MODEL_FOLDER
from nvium_core.options import RunOptions
from nvium_core.training.data.texts import documents_of
from nvium_core.training.recipes.catalogue import DENSE, recipe_named
from nvium_core.training.train import train

RECIPE = "small"
SHAPE = ("shape.width=128", "shape.mlp_width=344", "shape.num_heads=4", "shape.vocab_size=8192")
BASELINE = "dense-16"
KINDS = {
    "looped": (RECIPE, "shape.num_layers=4", "shape.loops=4"),
    "nvium": (RECIPE, "shape.num_layers=16"),
    BASELINE: (RECIPE + DENSE, "shape.num_layers=16"),
    "dense-4": (RECIPE + DENSE, "shape.num_layers=4"),
}
SEEDS = (1, 2, 3)
SEQUENCES, TOKENS, REPEATS = (1, 4, 8), 128, 9
KEPT = ("num_tokens", "perplexity", "bits_per_character", "exit_perplexities", "exit_shares", "mean_depth")


def trained(kind: str, seed: int, options: RunOptions, changes: Sequence[str]) -> Path:
    """Return the folder of a run's model. Train it first if necessary."""
    folder = options.folder / f"{kind}-{seed}"
    if (folder / MODEL_FOLDER).is_dir():
        return folder / MODEL_FOLDER
    recipe, *settings = KINDS[kind]
    return train(recipe_named(recipe, [*SHAPE, *settings, *changes, f"seed={seed}"]), replace(options, folder=folder))


def quality(models: Mapping[str, Path], documents: Sequence[str]) -> list[Figures]:
    """Evaluate models of one seed, each with its gain over the dense model of as many layers."""
    loaded = {kind: load_model(str(folder), "cpu") for kind, folder in models.items()}
    found = {kind: description(each) | evaluate(each.model, each.tokenizer, documents) for kind, each in loaded.items()}
    names = (*description(loaded[BASELINE]), *KEPT)
    return [
        {"kind": kind, **{name: each[name] for name in names}, **perplexity_gain(each, found[BASELINE])}
        for kind, each in found.items()
    ]


def speed(subjects: Mapping[str, Subject], num_sequences: int) -> Figures:
    """Measure all models with so many streams, in turns."""
    contenders = {}
    for kind, subject in subjects.items():
        (workload,) = workloads(subject, [num_sequences], TOKENS)
        contenders[kind] = contender(engine_for(subject.model, workload), workload, "race")
    turns = interleaved(contenders, REPEATS, count(num_sequences, "sequence"))
    return {
        "sequences": num_sequences,
        "models": {
            kind: summary(taken, workload)
            | {"exit_shares": shares(taken, subjects[kind].model.config.num_exits)}
            | ratio(f"over_{BASELINE}", rates(taken), rates(turns[BASELINE]))
            for kind, taken in turns.items()
        },
    }


def memory(folder: Path, tokens: int, threads: str) -> Figures:
    """Return a model's sizes in bytes. Run this in a process of its own: it measures the peak of the process."""
    use_processor("auto", threads)
    subject = subject_of(load_model(str(folder), "cpu"))
    (workload,) = workloads(subject, [max(SEQUENCES)], tokens)
    contender(engine_for(subject.model, workload), workload, "whole")(0)
    return {
        "peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "weight_bytes": sum(weight.nbytes for weight in subject.model.parameters()),
        "cache_bytes_per_token": page_bytes(subject.model.config, 1, subject.model.dtype, subject.model.dtype),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(prog="python -m research.paper.loops", description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--validation", type=Path, required=True)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--folder", type=Path, default=Path("runs/loops"))
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--threads", default="1", help="number of threads, or auto [1]")
    parser.add_argument("--set", dest="changes", action="append", default=[], help="as for nvium train")
    args = parser.parse_args(arguments)
    use_processor("auto", args.threads)
    options = RunOptions(data=args.data, folder=args.folder)
    models = {(kind, seed): trained(kind, seed, options, args.changes) for seed, kind in product(args.seeds, KINDS)}
    documents, first = list(documents_of(args.validation)), {kind: models[kind, args.seeds[0]] for kind in KINDS}
    subjects = {kind: subject_of(load_model(str(folder), "cpu")) for kind, folder in first.items()}
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as alone:
        sizes = {kind: alone.submit(memory, folder, TOKENS, args.threads).result() for kind, folder in first.items()}
    figures = {
        "n": len(args.seeds),
        "spread": "runs",
        "tokens": TOKENS,
        "repeats": REPEATS,
        "memory": sizes,
        "rows": [speed(subjects, number) for number in SEQUENCES],
        "runs": [
            {"seed": seed, **row}
            for seed in args.seeds
            for row in quality({kind: models[kind, seed] for kind in KINDS}, documents)
        ],
    }
    write_json(figures, args.json)


if __name__ == "__main__":
    main()
