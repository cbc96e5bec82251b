"""Measure the distance of GGUF files in our engine and in llama.cpp to the files' dequantized weights in float32.

    python -m research.distance MODEL.gguf … --data TEXT --json FILE

The reference is transformers in float32, with the file's weights dequantized. At every position of a text, its
distribution p is compared with the distribution q of an engine by KL(p || q). llama.cpp is the build in
`LLAMA_CPP_LIB_PATH`, or that of the package llama_cpp.

Shapes: T rows of a text, C rows of a chunk, V vocabulary.
"""

import math
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from random import Random

import numpy as np
import torch
import transformers
from rich.console import Console
from rich.table import Table
from torch import Tensor

from nvium_core.bench.contenders.contender import Workload
from nvium_core.bench.contenders.llama_cpp import LlamaCpp, builds
from nvium_core.bench.figures import Figures, check_place, write_json
from nvium_core.choices import CachePrecision, Precision, Weights
from nvium_core.engine.device.processor import use_processor
from nvium_core.evaluation.suite import digest
from nvium_core.loading import load_model
from nvium_core.training.data.texts import documents_of
from research.distance.native import engine_logits

CHUNK_ROWS = 128  # rows of float64 numbers in memory

OURS: dict[str, tuple[Precision, Weights, CachePrecision]] = {
    "--dtype float32": ("float32", "auto", "auto"),
    "--dtype float32 --cache-dtype float16": ("float32", "auto", "float16"),
    "--dtype float32 --cache-dtype bfloat16": ("float32", "auto", "bfloat16"),
    "--weights native": ("auto", "native", "auto"),
}
"""Our contenders by their options. The first is the default for quantized files, the last for files in bfloat16."""

REFERENCE = "reference"
QUANTILES = 0.5, 0.99, 0.999, 1.0

Logits = Callable[[list[int]], Iterable[Tensor]]
"""(token ids) → logits of all positions, in chunks of rows [C, V]."""


class Reference:
    """p at all positions of a text: the reference's distributions in float64."""

    def __init__(self, logits_TV: Tensor, target_T: Tensor) -> None:
        self.p_TV = torch.empty(logits_TV.shape, dtype=torch.float64)
        self.negative_entropy_T = torch.empty(len(target_T), dtype=torch.float64)
        self.target_T = target_T
        for first in range(0, len(target_T), CHUNK_ROWS):
            rows = slice(first, first + CHUNK_ROWS)
            log_p_CV = logits_TV[rows].double().log_softmax(-1)
            self.p_TV[rows] = log_p_CV.exp()
            self.negative_entropy_T[rows] = (self.p_TV[rows] * log_p_CV).sum(-1)


@dataclass
class Distances:
    """Values of all positions so far: KL, whether the most probable token is the same, and −ln q of the next token."""

    kl: list[float] = field(default_factory=list)
    is_same: list[bool] = field(default_factory=list)
    nll: list[float] = field(default_factory=list)

    def add(self, reference: Reference, rows: slice, logits_CV: Tensor) -> None:
        """Compare the logits of these positions. KL is Σ p ln p − Σ p x + ln Σ e^x, where x are the logits."""
        x_CV, p_CV, target_C1 = logits_CV.double(), reference.p_TV[rows], reference.target_T[rows, None]
        log_sum_C = x_CV.logsumexp(-1)
        kl_C = reference.negative_entropy_T[rows] - torch.einsum("cv,cv->c", p_CV, x_CV) + log_sum_C
        self.kl += kl_C.tolist()
        self.is_same += (p_CV.argmax(-1) == logits_CV.argmax(-1)).tolist()
        self.nll += (log_sum_C - x_CV.gather(-1, target_C1)[:, 0]).tolist()

    def figures(self) -> Figures:
        return {
            "kl_mean": float(np.mean(self.kl)),
            "kl_quantiles": {str(each): float(np.quantile(self.kl, each)) for each in QUANTILES},
            "same_first_token": float(np.mean(self.is_same)),
            "perplexity": math.exp(np.mean(self.nll)),
        }


def measure(file: Path, documents: Sequence[str], num_tokens: int, context: int) -> Iterator[Figures]:
    """Compare all engines with the reference, one text after another. Yield the figures so far after each text."""
    texts = list(windows(file, documents, num_tokens, context))
    reference, engines = reference_logits(file), contenders(file, context)
    found = {name: Distances() for name in (REFERENCE, *engines)}
    for number, token_ids in enumerate(texts, 1):
        compare(token_ids, reference, engines, found)
        sys.stderr.write(f"{file.name}: {number} of {len(texts)} texts\n")
        yield {
            "model": file.stem,
            "reference": f"transformers {transformers.__version__}, float32",
            "text": digest(documents),
            "n": number,
            "spread": "kl_quantiles",
            "num_tokens": len(found[REFERENCE].kl),
            "context": context,
            "engines": {name: distances.figures() for name, distances in found.items()},
        }


def windows(file: Path, documents: Sequence[str], num_tokens: int, context: int) -> Iterator[list[int]]:
    """Yield the first `context` + 1 tokens of documents in random order, until `num_tokens` have been targets."""
    tokenizer, left = load_model(str(file), "cpu").tokenizer, num_tokens
    for document in Random(0).sample(documents, len(documents)):
        token_ids = tokenizer(document, verbose=False).input_ids[: min(context, left) + 1]
        left -= len(token_ids) - 1
        yield token_ids
        if left <= 0:
            return


@torch.inference_mode()
def compare(
    token_ids: list[int], reference_logits: Logits, engines: Mapping[str, Logits], found: Mapping[str, Distances]
) -> None:
    inputs = token_ids[:-1]
    (logits_TV,) = reference_logits(inputs)
    reference = Reference(logits_TV, torch.tensor(token_ids[1:]))
    for name, logits in {REFERENCE: lambda _: [logits_TV], **engines}.items():
        first = 0
        for logits_CV in (rows_CV for chunk in logits(inputs) for rows_CV in chunk.split(CHUNK_ROWS)):
            rows = slice(first, first := first + len(logits_CV))
            found[name].add(reference, rows, logits_CV)


def reference_logits(file: Path) -> Logits:
    model = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    return lambda token_ids: [model(torch.tensor([token_ids]), use_cache=False).logits[0]]


def contenders(file: Path, context: int) -> dict[str, Logits]:
    """Return our engine with all options, and llama.cpp if a build is at hand."""
    model = cache(lambda dtype, weights: load_model(str(file), "cpu", dtype, weights=weights).model)
    found: dict[str, Logits] = {
        f"nvium {options}": engine_logits(model(dtype, weights), context, cache_dtype)
        for options, (dtype, weights, cache_dtype) in OURS.items()
    }
    if folders := [*builds().values()]:
        name, logits = llama_logits(folders[-1], file, context)
        found[name] = logits
    return found


def llama_logits(build: Path, file: Path, context: int) -> tuple[str, Logits]:
    """Return the name of this build of llama.cpp, and its function."""
    workload = Workload(prompt=[0] * context, num_sequences=1, num_tokens=1)
    model = LlamaCpp(build, file, None, workload, torch.get_num_threads())

    def logits(token_ids: list[int]) -> Iterator[Tensor]:
        model.clear()
        model.decode([(token, position, 0, True) for position, token in enumerate(token_ids)])
        for first in range(0, len(token_ids), CHUNK_ROWS):
            yield model.logits(range(first, min(first + CHUNK_ROWS, len(token_ids))))

    return f"llama.cpp {model.description['version']}", logits


def table(figures: Sequence[Figures]) -> Table:
    made = Table("model", "engine", "KL, mean", "KL, 99.9%", "same first token", "perplexity")
    for each in figures:
        exact = each["engines"][REFERENCE]["perplexity"]
        for name, row in each["engines"].items():
            change = f"{100 * (row['perplexity'] / exact - 1):+.3f}%" if name != REFERENCE else f"{exact:.4f}"
            values = (f"{row['kl_mean']:.2g}", f"{row['kl_quantiles']['0.999']:.2g}", f"{row['same_first_token']:.2%}")
            made.add_row(each["model"], name, *values, change)
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(prog="python -m research.distance", description=__doc__)
    add = parser.add_argument
    add("files", nargs="+", type=Path, metavar="MODEL.gguf", help="GGUF files of models without exits")
    add("--data", type=Path, required=True, help="text in a format that `nvium train` reads")
    add("--tokens", type=int, default=20_000, help="number of positions to compare [20000]")
    add("--context", type=int, default=1024, help="maximum tokens of a document to read [1024]")
    add("--threads", default="auto", help="number of threads [PyTorch's choice]")
    add("--json", type=Path, help="also write the results to this file, after each text")
    args = parser.parse_args(arguments)
    check_place(args.json)
    use_processor("auto", args.threads)
    documents, found = list(documents_of(args.data)), list[Figures]()
    for file in args.files:
        for figures in measure(file, documents, args.tokens, args.context):
            if args.json:
                write_json([*found, figures], args.json)
        found.append(figures)
    Console().print(table(found))


if __name__ == "__main__":
    main()
