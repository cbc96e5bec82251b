"""Our engine beside its own dense schedule and the dense twin in other engines, in turns.

Each contender generates the same number of tokens for each sequence from the same short prompt, prefill included. The
twin has random weights, on which speed does not depend. Contenders that cannot run are listed with the reason.
"""

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from rich.table import Table
from rich.text import Text

from nvium_core.bench.contenders.contender import Contender, ContenderFailed, Generation, Race
from nvium_core.bench.contenders.lineup import BASELINE, OTHERS, OURS, TWIN, Lineup, lineup, peer_of
from nvium_core.bench.contenders.llama_cpp import system_info
from nvium_core.bench.harness import Figures, Subject, interleaved, median_ratio
from nvium_core.bench.limit import TokenCosts, measured_costs, share_of_gain
from nvium_core.bench.machine import BUFFER_BYTES, ENOUGH_SECONDS, beside, demands, machine
from nvium_core.bench.schedules import predict
from nvium_core.bench.twin import num_parameters
from nvium_core.engine.params import EngineConfig, require
from nvium_core.planning.machine import Machine


def measure(
    subject: Subject,
    *,
    sequences: Sequence[int] = (1, 8),
    tokens: int = 64,
    repeats: int = 5,
    against: Collection[str] = OTHERS,
    seconds: float = 60,
    simulated_tokens: int = 10_000,
    buffer_bytes: int = BUFFER_BYTES,
    enough_seconds: float = ENOUGH_SECONDS,
) -> Figures:
    """A row for each number of sequences, and the machine's rates. `against` names the optional contenders. Once turns
    have taken `seconds`, the slowest contenders take no more."""
    room = subject.context - len(subject.prompt)
    require(tokens <= room, "tokens", f"after the prompt there is room for {room}, got {tokens}")
    rates = machine(subject.model.lm_head.weight, buffer_bytes, enough_seconds)
    with lineup(subject, against) as who:
        races = [Race(prompt=subject.prompt, num_sequences=number, num_tokens=tokens) for number in sequences]
        each = seconds / len(races)
        rows = [compare(who, race, rates, repeats, each, simulated_tokens) for race in races]
    return {
        "tokens": tokens,
        "repeats": repeats,
        "prompt_tokens": len(subject.prompt),
        "parameters": num_parameters(subject.model.config),
        "twin": {
            "parameters": num_parameters(who.twin.config),
            "mlp_width": who.twin.config.intermediate_size,
        },
        "machine": {name: subject.as_dict()[name] for name in ("instructions", "threads")} | rates,
        "llama_cpp": system_info(),
        "left_out": who.left_out,
        "rows": rows,
    }


@dataclass(frozen=True, slots=True)
class Turn:
    """A result, and the processor time of all threads in seconds."""

    generated: Generation
    processor_seconds: float


def compare(who: Lineup, race: Race, rates: Figures, repeats: int, seconds: float, simulated_tokens: int) -> Figures:
    """All contenders at one number of sequences."""
    with who.ready(race) as (engine, contenders):
        contenders[OURS](0)  # meets all that its schedule has to solve, which the next turn waits for
        costs = measured_costs(engine, race.prompt, race.num_tokens)
        label = f"{race.num_sequences} sequences"
        clocked = {name: on_the_clock(name, contender, race) for name, contender in contenders.items()}
        turns = interleaved(clocked, repeats, label, seconds)
    shown = {name: summary(taken, race) | beside_ours(turns[OURS], taken) for name, taken in turns.items()}
    routing = shares(turns[OURS], who.subject.model.config.num_exits)
    return {
        "sequences": race.num_sequences,
        "routing": routing,
        "contenders": shown,
        "ours_over": {peer: shown[best]["ours_over"] for peer, best in best_variants(shown).items()},
        "gain": gain(costs, routing, shown[BASELINE]["ours_over"], race.num_sequences, simulated_tokens),
        "work": work(who, race, routing, rates, shown),
    }


def on_the_clock(name: str, contender: Contender, race: Race) -> Callable[[int], Turn]:
    """The contender with its processor time. Raises `ContenderFailed` for a wrong number of tokens."""

    def turn(number: int) -> Turn:
        started = time.process_time()
        generated = contender(number)
        processor_seconds = time.process_time() - started
        if [len(tokens) for tokens in generated.token_ids] != [race.num_tokens] * race.num_sequences:
            raise ContenderFailed(f"{name}: not {race.num_tokens} tokens for each of {race.num_sequences} sequences")
        return Turn(generated, processor_seconds)

    return turn


def summary(turns: Sequence[Turn], race: Race) -> Figures:
    """Medians. ms_per_token is a sequence's; processor time is divided among all tokens."""
    num_tokens = race.num_tokens * race.num_sequences
    return {
        "tokens_per_second": median(turn.generated.tokens_per_second for turn in turns),
        "ms_per_token": 1000 * median(turn.generated.seconds for turn in turns) / race.num_tokens,
        "first_token_ms": 1000 * median(fmean(turn.generated.first_token_seconds) for turn in turns),
        "processor_ms_per_token": 1000 * median(turn.processor_seconds for turn in turns) / num_tokens,
        "turns": [turn.generated.tokens_per_second for turn in turns],
    }


def beside_ours(ours: Sequence[Turn], theirs: Sequence[Turn]) -> Figures:
    """Median ratios over turns, by wall-clock and by processor time."""
    speeds = ([turn.generated.tokens_per_second for turn in turns] for turns in (ours, theirs))
    times = ([turn.processor_seconds for turn in turns] for turns in (theirs, ours))
    return {"ours_over": median_ratio(*speeds), "ours_over_by_processor_time": median_ratio(*times)}


def best_variants(contenders: Mapping[str, Figures]) -> dict[str, str]:
    """The fastest contender of each peer, except ours."""
    by_speed = sorted(contenders.keys() - {OURS}, key=lambda name: contenders[name]["tokens_per_second"])
    return {peer_of(name): name for name in by_speed}


def shares(turns: Sequence[Turn], num_exits: int) -> tuple[float, ...]:
    """p_k as observed."""
    exits = sum((turn.generated.exits for turn in turns), Counter[int]())
    return tuple(exits[k] / exits.total() for k in range(1, num_exits + 1))


def gain(
    costs: TokenCosts, routing: tuple[float, ...], ratio: float, num_sequences: int, simulated_tokens: int
) -> Figures:
    """The measured speed-up, the simulated one, and for one sequence the limit."""
    config = EngineConfig(max_sequences=num_sequences)
    rates = predict(Machine(routing=routing, costs=costs.blocks, config=config), simulated_tokens)
    simulated = rates[OURS] / rates[BASELINE]
    found = {"costs": costs.as_dict(), "ratio": ratio, "simulated": simulated, "share_of_simulated": ratio / simulated}
    if num_sequences == 1:
        for name, best in (
            ("limit", costs.limit(routing)),
            ("limit_with_junctions_paid", costs.limit_with_junctions_paid(routing)),
        ):
            found |= {name: best, f"share_of_{name}": share_of_gain(ratio, best)}
    return found


def work(who: Lineup, race: Race, routing: Sequence[float], rates: Figures, shown: Mapping[str, Figures]) -> Figures:
    """Bytes and operations of a token halfway, and what the machine can do."""
    halfway = len(race.prompt) + race.num_tokens // 2
    asked = demands(who.subject.model, who.twin, routing, halfway, race.num_sequences)
    return {
        name: beside(asked[name], rates, shown[name]["tokens_per_second"])
        for name in (OURS, BASELINE, TWIN)
        if name in shown and name in asked
    }


def table(figures: Figures) -> Table:
    columns = "at once", "contender", "tokens/s", "ms/token", "first ms", "ours over it"
    result = Table(*columns, caption=Text("\n".join(remarks(figures))))
    for row in figures["rows"]:
        *_, last = row["contenders"]
        for name, seen in row["contenders"].items():
            values = (f"{seen[key]:.4g}" for key in ("tokens_per_second", "ms_per_token", "first_token_ms"))
            ratio = "" if name == OURS else f"{seen['ours_over']:.3f}"
            result.add_row(str(row["sequences"]), name, *values, ratio, end_section=name == last)
    return result


def remarks(figures: Figures) -> list[str]:
    """A line each for the gain, the machine, and contenders left out."""
    lines = [remark(row["sequences"], row["gain"]) for row in figures["rows"]]
    lines.append(machine_line(figures["machine"]))
    return lines + [f"Left out: {peer}, {reason}." for peer, reason in figures["left_out"].items()]


def machine_line(machine: Figures) -> str:
    """Three digits."""
    rates = machine["flops_per_second"].items()
    arithmetic = " and ".join(f"{rate / 1e9:.3g} Gflop/s in {precision}" for precision, rate in rates)
    where = f"With {machine['threads']} threads" + (f" and {found}" if (found := machine["instructions"]) else "")
    return f"{where} the machine reads {machine['bytes_per_second'] / 1e9:.3g} GB/s and does {arithmetic}."


def remark(num_sequences: int, found: Figures) -> str:
    text = f"{num_sequences} at once: {found['ratio']:.3f} over {BASELINE}, {found['simulated']:.3f} as simulated"
    if found.get("share_of_limit") is None:
        return f"{text}."
    return f"{text}; {found['share_of_limit']:.2f} of the gain that the limit {found['limit']:.3f} allows."
