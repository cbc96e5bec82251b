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

from nvium_core.bench.drafts import CALIBRATION_SECONDS, original_of
from nvium_core.bench.harness import Figures, Subject, Timed, interleaved, median_ratio, timed
from nvium_core.bench.limit import TokenCosts, measured_costs
from nvium_core.engine.engine import Engine
from nvium_core.engine.params import EngineConfig, SamplingParams
from nvium_core.model.llama import causal_attention
from nvium_core.model.nvium import NviumForCausalLM
from nvium_core.training.retrofitting.steering import log_odds, shift_to, shifted

DEPTHS = (0.9, 0.85, 0.8)
NUM_TEXTS = 8


def measure(subject: Subject, *, tokens: int = 128, repeats: int = 5) -> Figures:
    """A row for each depth."""
    asked = SamplingParams(max_tokens=tokens, sampling="exits", ignore_eos=True)
    config = EngineConfig(max_sequences=1, prefix_caching=False)
    dense = Engine(original_of(subject.model), config)
    dense.calibrate(max_seconds=CALIBRATION_SECONDS)
    costs = measured_costs(dense, subject.prompt, tokens)
    texts = [spoken(dense, subject, asked, NUM_TEXTS + number).generated[0][0] for number in range(NUM_TEXTS)]
    log_odds_RK = text_log_odds(subject.model, [subject.prompt + token_ids for token_ids in texts])
    rows = []
    for depth in DEPTHS:
        shift = shift_to(depth, log_odds_RK, subject.model.config.exit_layers or [])
        with shifted(subject.model, shift):
            found = beside_dense(subject, dense, costs, Engine(subject.model, config), asked, repeats)
        rows.append({"asked_depth": depth, "shift": shift, **found})
    return {"tokens": tokens, "repeats": repeats, "dense_costs": costs.as_dict(), "rows": rows}


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


def beside_dense(
    subject: Subject, dense: Engine, dense_costs: TokenCosts, early: Engine, asked: SamplingParams, repeats: int
) -> Figures:
    early.calibrate(max_seconds=CALIBRATION_SECONDS)
    costs = measured_costs(early, subject.prompt, asked.max_tokens)
    contenders = {
        name: partial(spoken, engine, subject, asked) for name, engine in (("early", early), ("dense", dense))
    }
    turns = interleaved(contenders, repeats, "early exits beside dense")
    rates = {name: [timing.tokens_per_second for timing in timings] for name, timings in turns.items()}
    exits = [exit_ for timing in turns["early"] for _, exits in timing.generated for exit_ in exits]
    layers = subject.model.config.exit_layers or []
    routing = [exits.count(number) / len(exits) for number in range(1, len(layers) + 1)]
    ratio, limit = median_ratio(rates["early"], rates["dense"]), dense_costs.seconds([1.0]) / costs.seconds(routing)
    return {
        "depth": sum(p * layer for p, layer in zip(routing, layers, strict=True)) / layers[-1],
        "routing": routing,
        **{f"tokens_per_second_{name}": median(values) for name, values in rates.items()},
        "ratio": ratio,
        "limit": limit,
        "share_of_limit": ratio / limit,
        "costs": costs.as_dict(),
    }


def table(figures: Figures) -> Table:
    result = Table("asked depth", "depth", "tokens/s", "dense tokens/s", "over dense", "limit", "share of limit")
    names = "depth", "tokens_per_second_early", "tokens_per_second_dense", "ratio", "limit", "share_of_limit"
    for row in figures["rows"]:
        result.add_row(f"{row['asked_depth']:g}", *(f"{row[name]:.3g}" for name in names))
    return result
