"""What tokens that leave early gain over the model without exits in the same engine, by mean depth.

All routers are shifted together to each depth, on what the model without exits says. Depth and limit are then those of
the tokens that were timed: a block's fixed cost is saved, rows, heads and adapters are not. The limit is of one
sequence: of several, how much of a block's cost is saved depends on who shares its Step.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from statistics import median

import torch
from rich.table import Table
from torch import Tensor

from nvium_core.bench.drafts import original_of
from nvium_core.bench.harness import Figures, Subject, Timed, interleaved, median_ratio, timed
from nvium_core.bench.limit import TokenCosts, measured_costs
from nvium_core.engine.engine import Engine
from nvium_core.engine.params import EngineConfig, SamplingParams
from nvium_core.engine.schedule.costs import StepCosts
from nvium_core.model.llama import causal_attention
from nvium_core.model.nvium import NviumForCausalLM
from nvium_core.training.retrofitting.steering import log_odds, shift_to, shifted

DEPTHS = (0.9, 0.85, 0.8)
NUM_TEXTS = 4
CALIBRATION_SECONDS = 6.0


def measure(subject: Subject, *, sequences: Sequence[int] = (1,), tokens: int = 128, repeats: int = 5) -> Figures:
    """A row for each number of sequences and depth, and the costs of one sequence if that is among the numbers."""
    asked = SamplingParams(max_tokens=tokens, sampling="exits", ignore_eos=True)
    layers, original = subject.model.config.exit_layers or [], original_of(subject.model)
    texts = original_texts(subject, original, asked, (repeats + 1) * max(sequences))
    log_odds_RK = text_log_odds(subject.model, texts)
    shifts = [shift_to(depth, log_odds_RK, layers) for depth in DEPTHS]
    rows, measured = list[Figures](), list[tuple[TokenCosts, ...]]()
    for number in sequences:
        config = EngineConfig(max_sequences=number, prefix_caching=False)
        dense = Engine(original, config)
        for depth, shift in zip(DEPTHS, shifts, strict=True):
            with shifted(subject.model, shift):
                engines = {"early": Engine(subject.model, config), "dense": dense}
                for engine in engines.values():
                    engine.calibrate(max_seconds=CALIBRATION_SECONDS)
                if number == 1:
                    measured.append(tuple(measured_costs(each, subject.prompt, tokens) for each in engines.values()))
                turns = race(subject, engines, asked, number, repeats)
            rows.append({"sequences": number, "asked_depth": depth, "shift": shift, **speeds(turns, layers)})
    return {"tokens": tokens, "repeats": repeats, **limited(rows, measured), "rows": rows}


def original_texts(subject: Subject, original: NviumForCausalLM, asked: SamplingParams, first: int) -> list[list[int]]:
    """What the model without exits says from seeds that no turn has."""
    engine = Engine(original, EngineConfig(max_sequences=1, prefix_caching=False))
    return [
        subject.prompt + timed(engine, [(subject.prompt, replace(asked, seed=seed))]).generated[0][0]
        for seed in range(first, first + NUM_TEXTS)
    ]


def limited(rows: Sequence[Figures], measured: Sequence[tuple[TokenCosts, ...]]) -> Figures:
    """The costs, after rows of one sequence have got their limit and their share of it."""
    if not measured:
        return {}
    early_costs, dense_costs = (least(costs) for costs in zip(*measured, strict=True))
    for row in rows:
        if row["sequences"] == 1:
            row["limit"] = dense_costs.seconds([1.0]) / early_costs.seconds(row["routing"])
            row["share_of_limit"] = row["ratio"] / row["limit"]
    return {"costs": early_costs.as_dict(), "dense_costs": dense_costs.as_dict()}


@torch.inference_mode()
def text_log_odds(model: NviumForCausalLM, texts: Sequence[list[int]]) -> Tensor:
    """Of leaving, in all rows of the texts, [R, K]."""
    parts = []
    for text in texts:
        states = model.hidden_states(torch.tensor([text]), torch.arange(len(text))[None], causal_attention())
        log_w_BTE2, _ = model.exit_outputs(states)
        parts.append(log_odds(log_w_BTE2[0, :, :-1]))
    return torch.cat(parts)


def race(
    subject: Subject, engines: dict[str, Engine], asked: SamplingParams, num_sequences: int, repeats: int
) -> dict[str, list[Timed]]:
    def run(engine: Engine, turn: int) -> Timed:
        seeds = range(turn * num_sequences, (turn + 1) * num_sequences)
        return timed(engine, [(subject.prompt, replace(asked, seed=seed)) for seed in seeds])

    contenders = {name: partial(run, engine) for name, engine in engines.items()}
    return interleaved(contenders, repeats, f"{num_sequences} sequences with early exits beside dense")


def least(measured: Sequence[TokenCosts]) -> TokenCosts:
    """Shifted routers cost the same, so that the least of several measurements is what the machine can do; of those
    numbers of rows that all had time for."""
    found = [costs.blocks.points for costs in measured]
    rows = set.intersection(*({*points} for each in found for points in each.values()))
    blocks = StepCosts({block: {r: min(each[block][r] for each in found) for r in rows} for block in found[0]})
    junction, head = (min(getattr(costs, name) for costs in measured) for name in ("junction", "head"))
    return TokenCosts(blocks=blocks, junction=junction, head=head)


def speeds(turns: dict[str, list[Timed]], layers: Sequence[int]) -> Figures:
    """With the depth and the routing of the tokens that were timed."""
    rates = {name: [timing.tokens_per_second for timing in timings] for name, timings in turns.items()}
    exits = [exit_ for timing in turns["early"] for _, exits in timing.generated for exit_ in exits]
    routing = [exits.count(number) / len(exits) for number in range(1, len(layers) + 1)]
    return {
        "depth": sum(p * layer for p, layer in zip(routing, layers, strict=True)) / layers[-1],
        "routing": routing,
        **{f"tokens_per_second_{name}": median(values) for name, values in rates.items()},
        "ratio": median_ratio(rates["early"], rates["dense"]),
        "turns": rates,
    }


def table(figures: Figures) -> Table:
    headings = "depth", "tokens/s", "dense tokens/s", "over dense", "limit", "share of limit"
    result = Table("sequences", "asked depth", *headings)
    names = "depth", "tokens_per_second_early", "tokens_per_second_dense", "ratio", "limit", "share_of_limit"
    for row in figures["rows"]:
        numbers = (f"{row[name]:.3g}" if name in row else "" for name in names)
        result.add_row(str(row["sequences"]), f"{row['asked_depth']:g}", *numbers)
    return result
