"""Speed of the engine, compared with others and with its own schedules."""

from collections.abc import Callable
from functools import partial
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from docs.tables.table import Cell, Table, digits, percent, read, row_of, table, verdict
from nvium_core.evaluation.paired import interval

CONTENDERS = {
    "synchronous": "our engine, all layers for every token (`synchronous`)",
    "dense twin": "our engine, the dense baseline",
    "generate": "transformers' `generate`, the dense baseline",
    "continuous": "transformers' continuous batching, the dense baseline",
    "llama.cpp": "llama.cpp, the dense baseline, its faster format",
}
LARGE, SMALL = "peers-24x768-bfloat16", "peers-tales-6m"
SCORED = {"AVX-512": "logprobs-tales-6m", "AVX2": "logprobs-tales-6m-avx2"}


@table
def peers() -> Table:
    columns = [row_of(read(LARGE), 1), row_of(read(SMALL), 1), row_of(read(SMALL), 8)]
    ours = [digits(row["contenders"]["optimal"]["tokens_per_second"], 1) for row in columns]
    head = ["over", "24 × 768, 1 sequence", "tales-6m, 1 sequence", "tales-6m, 8 sequences"]
    ratios = [[words, *(row["ours_over"][name] for row in columns)] for name, words in CONTENDERS.items()]
    return head, [*ratios, ["our tokens/s", *ours]]


RACES = (
    ("24 × 768, random weights", "race-24x768-avx512", (1,)),
    ("24 × 768, random weights", "race-24x768-many-avx512", (4, 8)),
    ("tales-6m", "race-tales-6m-avx512", (1, 8, 32)),
    ("SmolLM2-135M-Instruct, no exits", "race-smollm2-avx512", (1, 8)),
)


@table
def races() -> Table:
    """The newest races, with AVX-512; what a model without exits has no dense baseline for is empty."""
    head = ["model", "sequences", "over all layers for every token", "over its dense baseline", "over llama.cpp"]
    return head, [
        [words, number, *ratios(row_of(read(name), number)["ours_over"])]
        for words, name, numbers in RACES
        for number in numbers
    ]


def ratios(over: dict[str, float]) -> list[float | None]:
    has_exits = "dense twin" in over
    return [over["synchronous"] if has_exits else None, over.get("dense twin"), over["llama.cpp"]]


@table
def claims() -> Table:
    """Whatever the tables by build do not have."""
    alone, eight = row_of(read(SMALL), 1)["ours_over"], row_of(read(SMALL), 8)["ours_over"]
    places = {"thread": "overhead-tales-6m", "process": "overhead-process-tales-6m"}
    runs = [row for name in ("threads-24x768", "threads-tales-6m") for row in read(name)["rows"]]
    scored = [row["share_of_limit"] for name in SCORED.values() for row in read(name)["rows"]]
    claimed = [
        (
            "24 × 768, 1 sequence, over `generate` with the dense baseline",
            2.0,
            row_of(read(LARGE), 1)["ours_over"]["generate"],
        ),
        ("tales-6m, 1 sequence, over `generate` with the dense baseline", 4.0, alone["generate"]),
        ("tales-6m, 8 sequences, over continuous batching of the dense baseline", 1.5, eight["continuous"]),
        ("24 × 768, 1 sequence, two threads over one", 1.6, runs[0]["over_one"]["2"]),
        ("`--threads auto` over the best number, the lowest", 0.97, min(row["auto_over_best"] for row in runs)),
        ("log-probabilities, 1 and 8 sequences: share of the upper bound, the lowest", 0.9, min(scored)),
        *(
            (f"server, {row['streams']} streams, engine in a {place}: tokens/s over in-process", 0.9, row["share"])
            for place, name in places.items()
            for row in read(name)["rows"]
            if row["server"] != "engine"
        ),
    ]
    rows: list[list[Cell]] = [[what, asked, found, verdict(found >= asked)] for what, asked, found in claimed]
    return ["what", "target", "measured", ""], rows


ASKED = (
    ("tales-6m, 1 sequence, over llama.cpp", "race-tales-6m", 1, "llama.cpp", 1.5),
    ("tales-6m, 8 sequences, over llama.cpp", "race-tales-6m", 8, "llama.cpp", 1.5),
    *((f"tales-6m, {n} sequences, over `synchronous`", "race-tales-6m", n, "synchronous", 1.0) for n in (8, 16, 32)),
    *(
        (f"tales-6m, {n} sequences, over its dense baseline", "race-tales-6m", n, "dense twin", 0.95)
        for n in (8, 16, 32)
    ),
    ("24 × 768, 1 sequence, over llama.cpp", "race-24x768", 1, "llama.cpp", 1.5),
    ("24 × 768, 4 sequences, over llama.cpp", "race-24x768-many", 4, "llama.cpp", 1.2),
    ("24 × 768, 8 sequences, over llama.cpp", "race-24x768-many", 8, "llama.cpp", 1.0),
)
"""What, the files' name, sequences, over whom, and the least ratio."""

GAIN_ASKED, LLAMA = 0.95, "llama.cpp"
BUILDS = {"avx512": "AVX-512", "avx2": "AVX2"}


@table
def builds() -> Table:
    rows = [by_build(what, asked, partial(ours_over, name, n, peer)) for what, name, n, peer, asked in ASKED]
    what = "24 × 768, 1 sequence, share of the possible gain over `synchronous`"
    rows.append(by_build(what, GAIN_ASKED, partial(share_of_gain, "race-24x768")))
    return ["bfloat16, one thread", "target", *BUILDS.values()], rows


@table
def public_llama() -> Table:
    return ["over llama.cpp", "target", *BUILDS.values()], [
        by_build("1 sequence, tokens/s", 1.1, partial(ours_over, "race-smollm2", 1, LLAMA)),
        by_build("4 sequences, tokens/s", None, partial(ours_over, "race-smollm2", 4, LLAMA)),
        by_build("8 sequences, tokens/s", 1.2, partial(ours_over, "race-smollm2", 8, LLAMA)),
        ["first token after 512", 1.0, held(first_token_over("prompts-smollm2-avx512"), 1.0), None],
    ]


@table
def processor_seconds() -> Table:
    """Tokens each, of the public Llama: of a prompt, and by numbers of sequences."""
    runs = [(f"race-smollm2-{build}", words, n) for build, words in BUILDS.items() for n in (1, 4, 8)]
    head = ["", "AVX-512, prompt of 512", *(f"{words}, {n} at once" for _, words, n in runs)]
    prompts = read("prompts-smollm2-avx512")["rows"][0]
    names = {
        "ours, bfloat16": "optimal",
        "llama.cpp, BF16": "llama.cpp/bf16",
        "llama.cpp, F16": "llama.cpp/f16",
        "llama.cpp, the Q4_1 file": "llama.cpp with the file",
        "transformers, bfloat16": "generate/dynamic",
        "transformers, float32": "generate/float32",
    }
    return head, [
        [
            words,
            digits(1000 * prompts["prompt_tokens"] / prompts["contenders"][name]["processor_ms"]),
            *(digits(tokens_of_processor_second(file, n, name)) for file, _, n in runs),
        ]
        for words, name in names.items()
    ]


def tokens_of_processor_second(file: str, sequences: int, contender: str) -> float:
    return 1000 / float(row_of(read(file), sequences)["contenders"][contender]["processor_ms_per_token"])


@table
def quantised() -> Table:
    large, public = "24 × 768, 1 sequence", "SmolLM2-135M"
    return ["blocks of 32, one thread", "target", *BUILDS.values()], [
        by_build(f"{large}, q8 over llama.cpp's Q8_0", 1.0, partial(ours_over, "race-24x768-q8", 1, LLAMA)),
        by_build(
            f"{large}, q8, share of the possible gain",
            GAIN_ASKED,
            partial(share_of_gain, "race-24x768-q8"),
        ),
        by_build(f"{large}, q4 over llama.cpp's Q4_0", None, partial(ours_over, "race-24x768-q4", 1, LLAMA)),
        by_build(f"{public}, q8, 1 at once, over Q8_0", None, partial(ours_over, "race-smollm2-q8", 1, LLAMA)),
        by_build(f"{public}, q8, 8 at once, over Q8_0", None, partial(ours_over, "race-smollm2-q8", 8, LLAMA)),
    ]


class Measured(NamedTuple):
    """A median over turns, and the end of its 95% interval."""

    ratio: float
    high: float


def held(found: Measured | float, asked: float | None) -> str:
    """A ratio below its target, which the interval may still contain."""
    ratio, high = found if isinstance(found, Measured) else (found, found)
    if asked is None or ratio >= asked:
        return f"{ratio:.2f}"
    return f"{ratio:.2f}, {'within noise' if high >= asked else 'not met'}"


def by_build(what: str, asked: float | None, found: Callable[[str], Measured | float]) -> list[Cell]:
    """A row: what was asked for, and what each build gives."""
    return [what, asked, *(held(found(build), asked) for build in BUILDS)]


def ours_over(name: str, sequences: int, peer: str, build: str) -> Measured:
    """Over the peer's fastest variant."""
    row = row_of(read(f"{name}-{build}"), sequences)
    variants = [seen for key, seen in row["contenders"].items() if key.split("/")[0] == peer]
    fastest = max(variants, key=itemgetter("tokens_per_second"))
    ours = row["contenders"]["optimal"]["turns"]
    ratios = np.array([one / other for one, other in zip(ours, fastest["turns"], strict=False)])
    bounds = interval([len(ratios)], lambda samples: np.median(ratios[samples[0]], axis=1))
    ratio = row["ours_over"][peer]
    return Measured(ratio, bounds[1] if bounds else ratio)


def share_of_gain(name: str, build: str) -> float:
    share: float = row_of(read(f"{name}-{build}"), 1)["gain"]["share_of_limit"]
    return share


def first_token_over(name: str) -> float:
    return least(read(name)["rows"][0], LLAMA)


MOST_MICROSECONDS = {1: 60, 8: 100, 32: 250, 64: 400, 256: 1500}


@table
def host() -> Table:
    """Whole passes, and a block at a time, on a CPU and as on a GPU."""
    took = {
        (row["path"], row["schedule"], row["sequences"]): digits(row["step_us"])
        for row in read("host-stories-9m")["rows"]
    }
    columns = [("native", "synchronous"), ("native", "sweep"), ("graphs", "synchronous"), ("graphs", "sweep")]
    body: list[list[Cell]] = [
        [sequences, most, *(took[*column, sequences] for column in columns)]
        for sequences, most in MOST_MICROSECONDS.items()
    ]
    head = ["C++: all blocks, µs", "one block, µs", "CUDA graphs: all blocks, µs", "one block, µs"]
    return ["sequences", "target, µs", *head], body


@table
def threads() -> Table:
    """Two of them, and what calibration chooses."""
    runs = {"24 × 768": read("threads-24x768"), "tales-6m": read("threads-tales-6m")}
    body: list[list[Cell]] = [
        [name, row["sequences"], row["over_one"]["2"], row["best"], row["auto_over_best"]]
        for name, run in runs.items()
        for row in run["rows"]
    ]
    return ["", "sequences", "two over one", "best", "`auto` over the best"], body


@table
def depth() -> Table:
    rows = [(run["model"].removeprefix("random-"), run["rows"][0]["gain"]) for run in read("depth-768-bfloat16")]
    body = [[name, gain["ratio"], gain["limit"], gain["share_of_limit"]] for name, gain in rows]
    return ["layers × width", "over `synchronous`", "limit", "share of the gain"], body


@table
def limit() -> Table:
    costs = row_of(read(LARGE), 1)["gain"]["costs"]
    fixed, per_row = (sum(costs[name]) / len(costs[name]) for name in ("fixed_ms", "per_row_ms"))
    return ["a block, fixed, ms", "each position, ms", "the output head, ms"], [[fixed, per_row, costs["head_ms"]]]


@table
def first_token() -> Table:
    rows = read("prompts-tales-6m")["rows"]
    body = []
    for row in rows:
        best = {name: least(row, name) for name in ("generate", "llama.cpp")}
        ours = row["contenders"]["optimal"]["first_token_ms"]
        body.append([row["prompt_tokens"], ours, best["generate"], best["llama.cpp"]])
    return ["prompt, tokens", "ours, ms", "`generate` over ours", "llama.cpp over ours"], body


def least(row: dict[str, dict[str, dict[str, float]]], peer: str) -> float:
    """The peer's fastest variant."""
    return min(figures["over_ours"] for name, figures in row["contenders"].items() if name.split("/")[0] == peer)


@table
def step_parts() -> Table:
    rows = read("profile-tales-6m")["rows"]
    head = ["sequences", "an engine step, ms", "layers", "router and head", "host", "host's share"]
    return head, [
        [
            row["sequences"],
            row["step_ms"],
            (parts := row["parts_ms"])["layers"],
            parts["router"] + parts["head"],
            parts["runner"] + parts["engine"],
            percent(row["share_outside_kernels"], 0),
        ]
        for row in rows
    ]


@table
def schedules() -> Table:
    rows = read("schedules-tales-6m")["rows"]
    names = ["optimal", "sweep"]
    body = [[row["sequences"], *(row["schedules"][name]["over_synchronous"] for name in names)] for row in rows]
    return ["sequences", *(f"`{name}` over `synchronous`" for name in names)], body


@table
def chunking() -> Table:
    ways = read("chunking-tales-6m")["rows"][0]["ways"]
    names = {"chunked": "64 of its tokens a step, the default", "whole": "in one step"}
    body = [
        [words, digits(ways[key]["worst_gap_ms"]), digits(ways[key]["first_token_ms"])] for key, words in names.items()
    ]
    return ["a prompt of 900 tokens", "longest gap of a stream, ms", "its own first token, ms"], body


@table
def memory() -> Table:
    [row] = read("memory-tales-6m")["rows"]
    mb = [digits(row[name] / 1e6) for name in ("most_owned_bytes", "most_full_context_bytes")]
    return ["sequences", "pages in use, MB", "full contexts, MB", "unused, at worst"], [
        [row["sequences"], *mb, percent(row["worst_waste_share"])]
    ]


@table
def prefix() -> Table:
    runs = {"float32": read("prefix-tales-6m"), "float64": read("prefix-tales-6m-float64")}
    head = [
        "precision",
        "first token, known prefix, ms",
        "unknown, ms",
        "four choices over four requests",
        "tokens that differ",
    ]
    return head, [
        [
            name,
            run["warm_first_token_ms"],
            run["cold_first_token_ms"],
            run["forked_over_separate"],
            run["warm_differing_tokens"] + run["forked_differing_tokens"],
        ]
        for name, run in runs.items()
    ]


@table
def determinism() -> Table:
    rows = []
    for name in ("float32", "bfloat16"):
        run = read(f"determinism-tales-6m-{name}")
        differing = [run["modes"][mode]["differing_tokens"] for mode in ("default", "deterministic")]
        costs = [cost["deterministic_over_default"] for cost in run["cost"]]
        rows.append([name, 4 * run["answer_tokens"], *differing, *costs])
    shares = ["tokens/s kept, 1 sequence", "8 sequences"]
    return ["precision", "tokens", "differ by default", "differ with `--deterministic`", *shares], rows


@table
def logprobs() -> Table:
    head = [
        "instructions",
        "sequences",
        "tokens/s kept",
        "upper bound",
        "share of the bound",
        "first token, ms",
        "without, ms",
    ]
    names = "throughput_with_over_without", "limit_over_without", "share_of_limit"
    first = "first_token_ms_with", "first_token_ms_without"
    return head, [
        [build, row["sequences"], *(row[name] for name in (*names, *first))]
        for build, run in SCORED.items()
        for row in read(run)["rows"]
    ]


@table
def sampling() -> Table:
    run = read("sampling-stories-9m-avx512")
    over = "over plain", "over `synchronous`"
    head = ["", *(f"{ratio}, {row['sequences']} at once" for row in run["rows"] for ratio in over)]
    return head, [
        [
            ", ".join(f"`{option}` {value}" for option, value in asked.items()) or way,
            *(row["ways"][way][ratio] for row in run["rows"] for ratio in ("over_plain", "over_synchronous")),
        ]
        for way, asked in run["ways"].items()
    ]
