"""Compares our engine with itself at full depth, and with the dense twin in other engines.

Each contender generates the same number of tokens per sequence from the same short prompt. Times include prefill. Then
it reads longer prompts, each followed by one token. The twin has random weights, because speed hardly depends on them.
Contenders that cannot run are listed with the reason.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from statistics import fmean, median

from rich.table import Table

from nvium_core.bench.contenders.contender import ContenderFailed, Generation, Workload, states
from nvium_core.bench.contenders.lineup import BASELINE, OTHERS, OURS, Lineup, lineup, workloads
from nvium_core.bench.figures import Figures, machine
from nvium_core.bench.harness import Subject, conclusion, count, interleaved, ratio, spread

PROMPTS = (512, 2048)
"""Lengths of the prompts to read, in tokens. Those beyond the context are skipped."""


def measure(
    subject: Subject,
    *,
    sequences: Sequence[int] = (1, 8),
    tokens: int = 64,
    repeats: int = 5,
    against: Collection[str] = OTHERS,
    seconds: float = 60,
) -> Figures:
    """Measure all contenders at each number of sequences. Also measure the machine.

    against: names of the optional contenders.
    seconds: time limit of all turns. Slow contenders run fewer turns.
    """
    generating = workloads(subject, sequences, tokens)
    lengths = [length for length in PROMPTS if length < subject.context]
    reading = [Workload(prompt=(subject.prompt * n)[:n], num_sequences=1, num_tokens=1) for n in lengths]
    share = seconds / (len(generating) + len(reading))
    with lineup(subject, against) as chosen:
        rows = [{"sequences": each.num_sequences} | compare(chosen, each, repeats, share) for each in generating]
        read = [{"tokens": len(each.prompt)} | compare(chosen, each, repeats, share) for each in reading]
    return {
        "tokens": tokens,
        "repeats": repeats,
        "prompt_tokens": len(subject.prompt),
        "parameters": subject.model.num_parameters(),
        "twin": chosen.twin
        and {"parameters": chosen.twin.num_parameters(), "mlp_width": chosen.twin.config.intermediate_size},
        "machine": {name: subject.as_dict()[name] for name in ("instructions", "threads")}
        | machine(subject.model.lm_head.weight),
        "llama_cpp": chosen.builds,
        "left_out": chosen.left_out,
        "rows": rows,
        "prompts": read,
    }


def compare(chosen: Lineup, workload: Workload, repeats: int, seconds: float) -> Figures:
    """Return the share of each exit, each contender's `summary`, and the ratios of our speed to each peer's.

    Raise `ContenderFailed` if a contender generates a wrong number of tokens.
    """
    with chosen.ready(workload) as contenders:
        is_prompt, sequences = workload.num_tokens == 1, count(workload.num_sequences, "sequence")
        label = f"prompt of {len(workload.prompt)}" if is_prompt else sequences
        turns = interleaved(contenders, repeats, label, seconds)
    expected = [workload.num_tokens] * workload.num_sequences
    for name, taken in turns.items():
        if any([*map(len, turn.token_ids)] != expected for turn in taken):
            raise ContenderFailed(f"{name} did not generate {workload.num_tokens} tokens for every sequence")
    ours = turns.get(OURS, turns[BASELINE])
    shown = {
        name: summary(taken, workload) | ratio("ours_over", rates(ours), rates(taken)) for name, taken in turns.items()
    }
    best = best_variants(shown)
    ratios = {
        kind: {peer: shown[name][kind] for peer, name in best.items()}
        for kind in ("ours_over", "ours_over_quartiles", "ours_over_turns")
    }
    routing = shares(ours, chosen.subject.model.config.num_exits)
    return {"routing": routing, "contenders": shown, **ratios}


def rates(turns: Sequence[Generation]) -> list[float]:
    return [turn.tokens_per_second for turn in turns]


def summary(turns: Sequence[Generation], workload: Workload) -> Figures:
    """Return medians over the turns, and `states`. `ms_per_token` is the time per token of one sequence.

    If a workload generates only one token, the tokens per second are those of the prompt.
    """
    num_read = len(workload.prompt) if workload.num_tokens == 1 else 1
    speeds = [num_read * rate for rate in rates(turns)]
    return {
        "tokens_per_second": median(speeds),
        "ms_per_token": 1000 * median(turn.seconds for turn in turns) / workload.num_tokens,
        "first_token_ms": 1000 * median(fmean(turn.first_token_seconds) for turn in turns),
        "turns": speeds,
        **states(turns, speeds),
    }


def best_variants(contenders: Mapping[str, Figures]) -> dict[str, str]:
    """Return the fastest variant of each peer."""
    by_speed = sorted(contenders.keys() - {OURS}, key=lambda name: contenders[name]["tokens_per_second"])
    return {name.partition("/")[0]: name for name in by_speed}


def shares(turns: Sequence[Generation], num_exits: int) -> tuple[float, ...]:
    exits = Counter(exit_ for turn in turns for exits in turn.exits for exit_ in exits)
    return tuple(exits[k] / exits.total() for k in range(1, num_exits + 1))


def table(figures: Figures) -> Table:
    result = Table("work", "contender", "tokens/s", "first token ms", "our speed-up")
    result.caption = "\n".join(remarks(figures))
    parts = [(count(row["sequences"], "sequence"), row) for row in figures["rows"]]
    parts += [(f"prompt of {row['tokens']}", row) for row in figures["prompts"]]
    for work, row in parts:
        *_, last = row["contenders"]
        for name, seen in row["contenders"].items():
            is_ours = name == OURS or (name == BASELINE and "tokens" in row)
            over = "" if is_ours else spread("ours_over", seen)
            result.add_row(work, name, rate(seen), f"{seen['first_token_ms']:.4g}", over, end_section=name == last)
    return result


def rate(seen: Figures) -> str:
    """Format the median rate. If only some turns were disturbed, add the median of each state."""
    by_state = [f"{name} {state['tokens_per_second']:.4g}" for name, state in seen["states"].items()]
    return f"{seen['tokens_per_second']:.4g}" + (f" ({', '.join(by_state)})" if len(by_state) > 1 else "")


def remarks(figures: Figures) -> list[str]:
    gains = {row["sequences"]: row["contenders"][BASELINE] for row in figures["rows"]}
    left_out = [f"Skipped {peer}: {reason}." for peer, reason in figures["left_out"].items()]
    builds = [
        f"{name} is llama.cpp {build['version']}; {build['features']}" for name, build in figures["llama_cpp"].items()
    ]
    return [conclusion(figures["num_exits"], "ours_over", gains), *left_out, *builds]
