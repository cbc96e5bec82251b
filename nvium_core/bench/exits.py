"""What tokens that leave early gain over the model without exits in the same engine, for one sequence, by mean depth.

All routers are shifted together to each depth, on what the model without exits says. Depth and limit are then those of
the tokens that were timed: a block's fixed cost is saved, rows, heads and adapters are not.
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


def measure(subject: Subject, *, tokens: int = 128, repeats: int = 5) -> Figures:
    """A row for each depth."""
    asked = SamplingParams(max_tokens=tokens, sampling="exits", ignore_eos=True)
    config = EngineConfig(max_sequences=1, prefix_caching=False)
    layers, dense = subject.model.config.exit_layers or [], Engine(original_of(subject.model), config)
    seeds = range(repeats + 1, repeats + 1 + NUM_TEXTS)
    texts = [subject.prompt + spoken(dense, subject, asked, seed).generated[0][0] for seed in seeds]
    log_odds_RK = text_log_odds(subject.model, texts)
    rows, measured = [], list[tuple[TokenCosts, ...]]()
    for depth in DEPTHS:
        shift = shift_to(depth, log_odds_RK, layers)
        with shifted(subject.model, shift):
            engines = {"early": Engine(subject.model, config), "dense": dense}
            costs, turns = raced(subject, engines, asked, repeats)
        measured.append(costs)
        rows.append({"asked_depth": depth, "shift": shift, **speeds(turns, layers)})
    early_costs, dense_costs = (least(costs) for costs in zip(*measured, strict=True))
    for row in rows:
        row["limit"] = dense_costs.seconds([1.0]) / early_costs.seconds(row["routing"])
        row["share_of_limit"] = row["ratio"] / row["limit"]
    named = {"costs": early_costs.as_dict(), "dense_costs": dense_costs.as_dict()}
    return {"tokens": tokens, "repeats": repeats, **named, "rows": rows}


def spoken(engine: Engine, subject: Subject, asked: SamplingParams, seed: int) -> Timed:
    return timed(engine, [(subject.prompt, replace(asked, seed=seed))])


@torch.inference_mode()
def text_log_odds(model: NviumForCausalLM, texts: Sequence[list[int]]) -> Tensor:
    """Of leaving, in all rows of the texts, [R, K]."""
    parts = []
    for text in texts:
        states = model.hidden_states(torch.tensor([text]), torch.arange(len(text))[None], causal_attention())
        log_w_BTE2, _ = model.exit_outputs(states)
        parts.append(log_odds(log_w_BTE2[0, :, :-1]))
    return torch.cat(parts)


def raced(
    subject: Subject, engines: dict[str, Engine], asked: SamplingParams, repeats: int
) -> tuple[tuple[TokenCosts, ...], dict[str, list[Timed]]]:
    """The engines' costs, measured just before, and their turns."""
    for engine in engines.values():
        engine.calibrate(max_seconds=CALIBRATION_SECONDS)
    costs = tuple(measured_costs(engine, subject.prompt, asked.max_tokens) for engine in engines.values())
    contenders = {name: partial(spoken, engine, subject, asked) for name, engine in engines.items()}
    return costs, interleaved(contenders, repeats, "early exits beside dense")


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
    result = Table("asked depth", "depth", "tokens/s", "dense tokens/s", "over dense", "limit", "share of limit")
    names = "depth", "tokens_per_second_early", "tokens_per_second_dense", "ratio", "limit", "share_of_limit"
    for row in figures["rows"]:
        result.add_row(f"{row['asked_depth']:g}", *(f"{row[name]:.3g}" for name in names))
    return result
