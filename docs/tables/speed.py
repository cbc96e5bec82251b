"""Speed of the engine, compared with others and with its own schedules."""

from docs.tables.table import Cell, Table, digits, percent, read, row_of, table, verdict

CONTENDERS = {
    "synchronous": "our engine, all layers for every token (`synchronous`)",
    "dense twin": "our engine, the dense twin",
    "generate": "transformers' `generate`, the dense twin",
    "continuous": "transformers' continuous batching, the dense twin",
    "llama.cpp": "llama.cpp, the dense twin, its faster format",
}
LARGE, SMALL, GAIN = "peers-24x768-bfloat16", "peers-tales-6m", "gain-24x768-bfloat16"


@table
def peers() -> Table:
    columns = [row_of(read(LARGE), 1), row_of(read(SMALL), 1), row_of(read(SMALL), 8)]
    ours = [digits(row["contenders"]["optimal"]["tokens_per_second"], 1) for row in columns]
    head = ["over", "24 × 768, 1 sequence", "embedded, 1 sequence", "embedded, 8 sequences"]
    ratios = [[words, *(row["ours_over"][name] for row in columns)] for name, words in CONTENDERS.items()]
    return head, [*ratios, ["our tokens/s", *ours]]


@table
def claims() -> Table:
    large, gain = row_of(read(LARGE), 1), row_of(read(GAIN), 1)
    alone, eight = row_of(read(SMALL), 1), row_of(read(SMALL), 8)
    predicted = [row["schedules"]["optimal"]["share_of_predicted"] for row in read("schedules-tales-6m")["rows"]]
    own = row_of(read("profile-tales-6m"), 8)["share_outside_kernels"]
    served = read("overhead-tales-6m")["rows"][-1]["share"]
    claimed = [
        (
            "24 × 768, 1 sequence: share of the limit of the gain over `synchronous`",
            0.95,
            gain["gain"]["share_of_limit"],
        ),
        ("the same against `generate` with the dense twin", 2.0, large["ours_over"]["generate"]),
        ("the same against llama.cpp with the dense twin", 1.0, large["ours_over"]["llama.cpp"]),
        ("embedded, 1 sequence, against `generate`", 4.0, alone["ours_over"]["generate"]),
        ("embedded, 2, 4 and 8 sequences: least share of the predicted gain", 0.95, min(predicted)),
        ("embedded, 8 sequences, against continuous batching", 1.5, eight["ours_over"]["continuous"]),
        ("server, 32 streams: tokens/s over in-process", 0.9, served),
    ]
    rows = [[what, f"at least {asked:.2f}", found, verdict(found >= asked)] for what, asked, found in claimed]
    own_row = ["embedded, 8 sequences: engine's own share of a Step", "at most 0.10", own, verdict(own <= 0.1)]
    return ["what", "target", "measured", ""], [*rows, own_row]


ASKED = (
    ("embedded, 1 sequence, over llama.cpp", "race-tales-6m", 1, "llama.cpp", 1.5),
    ("embedded, 8 sequences, over llama.cpp", "race-tales-6m", 8, "llama.cpp", 1.5),
    *((f"embedded, {n} sequences, over `synchronous`", "race-tales-6m", n, "synchronous", 1.0) for n in (8, 16, 32)),
    *((f"embedded, {n} sequences, over the dense twin", "race-tales-6m", n, "dense twin", 0.95) for n in (8, 16, 32)),
    ("24 × 768, 1 sequence, over llama.cpp", "race-24x768", 1, "llama.cpp", 1.5),
)
"""What, the files' name, sequences, over whom, and the least ratio."""

BUILDS = {"avx512": "AVX-512", "avx2": "AVX2"}


@table
def builds() -> Table:
    rows: list[list[Cell]] = []
    for what, name, sequences, peer, asked in ASKED:
        ratios = [row_of(read(f"{name}-{build}"), sequences)["ours_over"][peer] for build in BUILDS]
        rows.append([what, asked, *(f"{ratio:.2f}{'' if ratio >= asked else ', not met'}" for ratio in ratios)])
    gains = [row_of(read(f"race-24x768-{build}"), 1)["gain"]["share_of_limit"] for build in BUILDS]
    shares = (f"{share:.2f}{'' if share >= GAIN_ASKED else ', not met'}" for share in gains)
    rows.append(["24 × 768, 1 sequence, share of the possible gain over `synchronous`", GAIN_ASKED, *shares])
    return ["bfloat16, one thread", "at least", *BUILDS.values()], rows


GAIN_ASKED = 0.95


@table
def public_llama() -> Table:
    race, first = read("race-smollm2-avx512"), read("prompts-smollm2-avx512")["rows"][0]
    claimed = [
        ("1 sequence, tokens/s", 1.1, row_of(race, 1)["ours_over"]["llama.cpp"]),
        ("8 sequences, tokens/s", 1.2, row_of(race, 8)["ours_over"]["llama.cpp"]),
        ("first token after 512", 1.0, least(first, "llama.cpp")),
    ]
    rows: list[list[Cell]] = [[what, asked, found, verdict(found >= asked)] for what, asked, found in claimed]
    return ["over llama.cpp", "at least", "AVX-512", ""], rows


@table
def quantised() -> Table:
    ours, public = read("race-24x768-q8-avx2"), read("race-smollm2-q8-avx2")
    claimed = [
        ("24 × 768, 1 sequence, over llama.cpp's Q8_0 of the twin", 1.0, row_of(ours, 1)["ours_over"]["llama.cpp"]),
        ("24 × 768, 1 sequence, share of the possible gain", GAIN_ASKED, row_of(ours, 1)["gain"]["share_of_limit"]),
        *(
            (f"SmolLM2-135M, {n} at once, over llama.cpp's Q8_0", None, row_of(public, n)["ours_over"]["llama.cpp"])
            for n in (1, 8)
        ),
    ]
    rows: list[list[Cell]] = [
        [what, asked, found, verdict(found >= asked) if asked is not None else None] for what, asked, found in claimed
    ]
    return ["q8, one thread", "at least", "AVX2", ""], rows


MOST_MICROSECONDS = {1: 60, 8: 100, 32: 250, 64: 400, 256: 1500}


@table
def host() -> Table:
    """Whole passes, and a block at a time, on a CPU and as on a GPU."""
    took = {
        (row["path"], row["schedule"], row["sequences"]): digits(row["step_us"])
        for row in read("host-tales-6m")["rows"]
    }
    columns = [("native", "synchronous"), ("native", "sweep"), ("graphs", "synchronous"), ("graphs", "sweep")]
    body: list[list[Cell]] = [
        [sequences, most, *(took[*column, sequences] for column in columns)]
        for sequences, most in MOST_MICROSECONDS.items()
    ]
    head = ["native: a pass, µs", "a Step of one block, µs", "graphs: a pass, µs", "a Step of one block, µs"]
    return ["sequences", "at most, µs", *head], body


@table
def threads() -> Table:
    """Two of them, and what calibration chooses."""
    runs = {"24 × 768": read("threads-24x768"), "embedded": read("threads-tales-6m")}
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
    return ["a block, fixed, ms", "each row, ms", "the head, ms"], [[fixed, per_row, costs["head_ms"]]]


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
    return min(figures["over_ours"] for name, figures in row["contenders"].items() if name.startswith(peer))


@table
def step_parts() -> Table:
    rows = read("profile-tales-6m")["rows"]
    head = ["sequences", "a Step, ms", "layers", "router and head", "the engine's own", "own share"]
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
    names = {"chunked": "64 rows a Step, the default", "whole": "taken whole"}
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
        "at most, by the limit",
        "share of the limit",
        "first token, ms",
        "without, ms",
    ]
    names = "throughput_with_over_without", "limit_over_without", "share_of_limit"
    first = "first_token_ms_with", "first_token_ms_without"
    runs = {"AVX-512": "logprobs-tales-6m", "AVX2": "logprobs-tales-6m-avx2"}
    return head, [
        [build, row["sequences"], *(row[name] for name in (*names, *first))]
        for build, run in runs.items()
        for row in read(run)["rows"]
    ]
