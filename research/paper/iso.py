"""Find the dense model that costs as much as an N-vium: in training (isoFLOP) and per generated token (isoSpeed).

python -m research.paper.iso --model runs/small/model --depths 6,9,12
"""

from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median

import numpy as np
from numpy.typing import NDArray

from nvium_core.bench.contenders.lineup import SWEEP, contender, engine_for, workloads
from nvium_core.bench.figures import Figures, write_json
from nvium_core.bench.harness import Subject, interleaved, load_subject
from nvium_core.bench.shapes import random_rival
from nvium_core.engine.device.processor import use_processor
from nvium_core.evaluation.perplexity import EvaluationError
from nvium_core.evaluation.suite import Interval, Sample, interval, with_interval
from nvium_core.model.config import univium_config
from nvium_core.model.flops import flops_per_token
from nvium_core.model.nvium import Nvium
from nvium_core.training.caveats import warnings
from nvium_core.training.recipes.catalogue import recipe_named
from nvium_core.training.recipes.recipe import RecipeError
from research.markdown import Row, table
from research.paper import results

OURS, MAX_NEW_TOKENS = "ours", 128


def iso_flop_tokens(flops: float, dense_flops: float, num_tokens: float) -> float:
    """Return the number of tokens on which a dense model trains for the same FLOPs: D_dense = F / F_dense · D."""
    return flops / dense_flops * num_tokens


def iso_speed_layers(dense_milliseconds: Mapping[int, float], milliseconds: float) -> float:
    """Return, by linear regression, the number of layers with which a dense model takes `milliseconds` per token."""
    if len(dense_milliseconds) < 2:
        raise EvaluationError("to find the dense depth of equal speed, measure two or more depths")
    per_layer, fixed = np.polyfit(list(dense_milliseconds), list(dense_milliseconds.values()), 1)
    return float((milliseconds - fixed) / per_layer)


def iso_speed_interval(dense_milliseconds: Mapping[int, Sequence[float]], ours: Sequence[float]) -> Interval | None:
    """Return the bootstrap interval of `iso_speed_layers` over the turns."""
    times = np.array([ours, *dense_milliseconds.values()])

    def depths_of(samples: list[Sample]) -> NDArray[np.float64]:
        our_S, *dense_DS = np.median(times[:, samples[0]], axis=2)
        per_layer_S, fixed_S = np.polyfit(list(dense_milliseconds), np.stack(dense_DS), 1)
        found: NDArray[np.float64] = (our_S - fixed_S) / per_layer_S
        return found

    return interval([len(ours)], depths_of)


def evaluate_iso(subject: Subject, depths: Sequence[int], num_tokens: float, trials: int) -> Figures:
    """Compare a model with dense models that have the same width, several depths and random weights.

    `num_tokens` is the number of tokens that the model was trained on. If it is 1, a dense model's number of tokens is
    relative to ours. All models answer one prompt in turns.
    """
    if len(set(depths)) < 2 or min(depths) < 1:
        raise EvaluationError("--depths needs two or more numbers of layers")
    models = {depth: dense_model(subject, depth) for depth in depths}
    times = measured_times(subject, models, trials)
    of_depths = {depth: times[str(depth)] for depth in depths}
    middles = {depth: median(each) for depth, each in of_depths.items()}
    bounds = iso_speed_interval(of_depths, times[OURS])
    return {
        **subject.as_dict(),
        **row(subject.model, times[OURS], num_tokens),
        "trials": trials,
        "dense": [
            row(model, of_depths[depth], iso_flop_tokens(flops_of(subject.model), flops_of(model), num_tokens))
            for depth, model in models.items()
        ],
        "iso_speed_layers": iso_speed_layers(middles, median(times[OURS])),
        "iso_speed_layers_interval": bounds and list(bounds),
    }


def row(model: Nvium, times: Sequence[float], num_tokens: float) -> Figures:
    config = model.config
    return {
        "layers": config.num_hidden_layers,
        "width": config.hidden_size,
        "num_parameters": model.num_parameters(),
        "milliseconds": median(times),
        "flops": flops_of(model),
        "tokens": num_tokens,
    }


def dense_model(subject: Subject, depth: int) -> Nvium:
    model = subject.model
    config = univium_config(model.config)
    config.num_hidden_layers, config.exit_layers = depth, [depth]
    return random_rival(model, config, subject.weights)


def trained_tokens(subject: Subject, shape: str | None) -> int | None:
    """Return how many tokens the model or the paper's model was trained on, or None if unknown."""
    if shape:
        with suppress(RecipeError):
            return recipe_named(f"paper-{shape}", []).total_tokens
    return subject.model.config.training_tokens


def flops_of(model: Nvium) -> float:
    """Return the forward FLOPs of a token that attends to the whole context."""
    return flops_per_token(model.config, model.config.max_position_embeddings)


def measured_times(subject: Subject, models: Mapping[int, Nvium], trials: int) -> dict[str, list[float]]:
    """Return milliseconds per token in every trial, by model: `OURS`, or a dense model's number of layers."""
    num_tokens = min(MAX_NEW_TOKENS, subject.context - len(subject.prompt))
    [workload] = workloads(subject, [1], num_tokens)
    running = {OURS: subject.model} | {str(depth): model for depth, model in models.items()}
    contenders = {name: contender(engine_for(model, workload), workload, SWEEP) for name, model in running.items()}
    turns = interleaved(contenders, trials, subject.name)
    return {name: [1000 * turn.seconds / num_tokens for turn in of_model] for name, of_model in turns.items()}


def markdown(figures: Figures) -> str:
    """Format a row for each model, the paper's rows, and the depth at which a dense model has equal speed."""
    columns = ["model", "layers", "M parameters", "tokens/s", "MFLOPs a token", "tokens of equal FLOPs", "perplexity"]
    rows = [shown(name, of) for name, of in [(figures["model"], figures), *(("dense", of) for of in figures["dense"])]]
    rows += [shown(name, of) for name, of in papers(figures)]
    depth = with_interval(f"{figures['iso_speed_layers']:.1f}", figures["iso_speed_layers_interval"], level=0)
    conclusion = f"A dense model of {depth} layers takes as long per token."
    return "\n\n".join([table(columns, rows), conclusion, *warnings(figures)])


def shown(name: str, of: Figures) -> Row:
    rate = 1000 / of["milliseconds"]
    return [name, of["layers"], of["num_parameters"] / 1e6, rate, of["flops"] / 1e6, of["tokens"], of.get("perplexity")]


def papers(figures: Figures) -> list[tuple[str, Figures]]:
    """Return the paper's 4-vium of this shape, and its dense model of equal cost."""
    found = results.ISO.get((figures["layers"], figures["width"]), ())
    return [(name, point._asdict()) for name, point in zip(("the paper's", "its dense"), found, strict=False)]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(prog="python -m research.paper.iso", description=__doc__.splitlines()[0])
    parser.add_argument("--depths", required=True, help="numbers of layers of the dense models, such as 6,9,12")
    parser.add_argument("--model", help="folder or Hub name [the bundled model]")
    parser.add_argument("--shape", help="use random weights of one of the paper's shapes, such as 36x768")
    parser.add_argument("--tokens", type=float, help="tokens that the model was trained on [its run's or the paper's]")
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", default="auto")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(arguments)
    use_processor("auto", args.threads)
    subject = load_subject(args.model, args.shape, None, None, "cpu", args.dtype)
    read = args.tokens or trained_tokens(subject, args.shape) or 1
    figures = evaluate_iso(subject, [int(depth) for depth in args.depths.split(",")], read, args.trials)
    print(markdown(figures))
    if args.json:
        write_json(figures, args.json)


if __name__ == "__main__":
    main()
