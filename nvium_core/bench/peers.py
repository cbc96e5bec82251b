"""Compares our engine with itself at full depth, and with the dense twin in other engines.

Each contender generates the same number of tokens per sequence from the same short prompt. Times include prefill. The
twin has random weights, because speed hardly depends on them. Contenders that cannot run are listed with the reason.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from statistics import fmean, median

from rich.table import Table
from rich.text import Text

from nvium_core.bench.contenders import own
from nvium_core.bench.contenders.contender import Contender, ContenderFailed, Generation, Workload
from nvium_core.bench.contenders.lineup import BASELINE, OTHERS, OURS, Lineup, lineup
from nvium_core.bench.contenders.llama_cpp import system_info
from nvium_core.bench.harness import Figures, Subject, conclusion, interleaved, median_ratio
from nvium_core.bench.machine import BUFFER_BYTES, machine
from nvium_core.bench.twin import num_parameters


def measure(
    subject: Subject,
    *,
    sequences: Sequence[int] = (1, 8),
    tokens: int = 64,
    repeats: int = 5,
    against: Collection[str] = OTHERS,
    seconds: float = 60,
    buffer_bytes: int = BUFFER_BYTES,
) -> Figures:
    """Measure all contenders at each number of sequences. Also measure the machine.

    against: names of the optional contenders.
    seconds: time limit of all turns. Slow contenders run fewer turns.
    """
    workloads = own.workloads(subject, sequences, tokens)
    with lineup(subject, against) as chosen:
        rows = [compare(chosen, workload, repeats, seconds / len(workloads)) for workload in workloads]
    return {
        "tokens": tokens,
        "repeats": repeats,
        "prompt_tokens": len(subject.prompt),
        "parameters": num_parameters(subject.model.config),
        "twin": {
            "parameters": num_parameters(chosen.twin.config),
            "mlp_width": chosen.twin.config.intermediate_size,
        },
        "machine": {name: subject.as_dict()[name] for name in ("instructions", "threads")}
        | machine(subject.model.lm_head.weight, buffer_bytes),
        "llama_cpp": system_info(),
        "left_out": chosen.left_out,
        "rows": rows,
    }


def compare(chosen: Lineup, workload: Workload, repeats: int, seconds: float) -> Figures:
    """Measure all contenders on one workload."""
    with chosen.ready(workload) as contenders:
        label = "1 sequence" if workload.num_sequences == 1 else f"{workload.num_sequences} sequences"
        counted = {name: checked_turn(name, contender, workload) for name, contender in contenders.items()}
        turns = interleaved(counted, repeats, label, seconds)
    ours = rates(turns[OURS])
    shown = {
        name: summary(turn, workload) | {"ours_over": median_ratio(ours, rates(turn))} for name, turn in turns.items()
    }
    routing = shares(turns[OURS], chosen.subject.model.config.num_exits)
    return {
        "sequences": workload.num_sequences,
        "routing": routing,
        "contenders": shown,
        "ours_over": {peer: shown[best]["ours_over"] for peer, best in best_variants(shown).items()},
    }


def checked_turn(name: str, contender: Contender, workload: Workload) -> Contender:
    """Wrap a contender to raise `ContenderFailed` if it generates a wrong number of tokens."""

    def turn(number: int) -> Generation:
        generated = contender(number)
        if [len(tokens) for tokens in generated.token_ids] != [workload.num_tokens] * workload.num_sequences:
            raise ContenderFailed(f"{name} did not generate {workload.num_tokens} tokens for every sequence")
        return generated

    return turn


def rates(turns: Sequence[Generation]) -> list[float]:
    return [turn.tokens_per_second for turn in turns]


def summary(turns: Sequence[Generation], workload: Workload) -> Figures:
    """Return medians over the turns. `ms_per_token` is the time per token of one sequence."""
    return {
        "tokens_per_second": median(rates(turns)),
        "ms_per_token": 1000 * median(turn.seconds for turn in turns) / workload.num_tokens,
        "first_token_ms": 1000 * median(fmean(turn.first_token_seconds) for turn in turns),
        "turns": rates(turns),
    }


def best_variants(contenders: Mapping[str, Figures]) -> dict[str, str]:
    """Return contender → name of its fastest variant, for all contenders except ours."""
    by_speed = sorted(contenders.keys() - {OURS}, key=lambda name: contenders[name]["tokens_per_second"])
    return {name.partition("/")[0]: name for name in by_speed}


def shares(turns: Sequence[Generation], num_exits: int) -> tuple[float, ...]:
    """Return the share of the tokens that left at each exit."""
    exits = Counter(exit_ for turn in turns for exits in turn.exits for exit_ in exits)
    return tuple(exits[k] / exits.total() for k in range(1, num_exits + 1))


def table(figures: Figures) -> Table:
    columns = "sequences", "contender", "tokens/s", "ms/token", "first token ms", "our speed-up"
    result = Table(*columns, caption=Text("\n".join(remarks(figures))))
    for row in figures["rows"]:
        *_, last = row["contenders"]
        for name, seen in row["contenders"].items():
            values = (f"{seen[key]:.4g}" for key in ("tokens_per_second", "ms_per_token", "first_token_ms"))
            ratio = "" if name == OURS else f"{seen['ours_over']:.3f}"
            result.add_row(str(row["sequences"]), name, *values, ratio, end_section=name == last)
    return result


def remarks(figures: Figures) -> list[str]:
    """Return a line for each skipped contender, then a sentence with the speed-ups."""
    left_out = [f"Skipped {peer}: {reason}." for peer, reason in figures["left_out"].items()]
    gains = {row["sequences"]: row["contenders"][BASELINE]["ours_over"] for row in figures["rows"]}
    return [*left_out, conclusion(figures["num_exits"], gains)]
