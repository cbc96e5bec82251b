"""What drafts gain where every token is the original's, over the model without exits and over the same engine without
drafts; and how often an exit's draft is the last exit's token, by three rules.

Shapes: R rows, V vocabulary.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import cycle
from statistics import median

import torch
from rich.table import Table
from torch import Tensor

from nvium_core.bench.harness import Figures, Subject, Timed, interleaved, median_ratio, timed
from nvium_core.engine.device.sampling import draw_by_race, inverse_cdf
from nvium_core.engine.engine import Engine
from nvium_core.engine.params import EngineConfig, SamplingParams
from nvium_core.engine.schedule.drafting import Drafting
from nvium_core.engine.schedule.randomness import TOKEN, uniform
from nvium_core.engine.schedule.sequence import DRAFTER
from nvium_core.model.llama import causal_attention
from nvium_core.model.nvium import NviumForCausalLM
from nvium_core.training.baselines.univium import univium_config

TEMPERATURES = (1.0, 0.0)
ROWS_AT_ONCE = 64
CALIBRATION_SECONDS = 10.0

LENGTHS = (1.0, 0.5, 1.5, 0.75, 1.25)
"""Of the answers of several sequences, over the length that is asked for, one after another. If all began at once, were
as long and none followed, their prompts would be read together without drafts, and one by one with them."""


def measure(subject: Subject, *, sequences: Sequence[int] = (1,), tokens: int = 128, repeats: int = 5) -> Figures:
    """A row for each number of sequences and temperature, with all turns; and how often drafts would be right of what
    was said at temperature 1. `limit` is what the measured costs and the drafts that were right allow, over the dense
    schedule."""
    original = original_of(subject.model)
    rows, texts = [], list[list[int]]()
    for number in sequences:
        engines = {
            "lossless": subject.engine(max_sequences=number, prefix_caching=False),
            "dense": Engine(original, EngineConfig(max_sequences=number, prefix_caching=False, max_drafts=0)),
        }
        for engine in engines.values():
            engine.calibrate(max_seconds=CALIBRATION_SECONDS)
        for temperature in TEMPERATURES:
            drafting = engines["lossless"].scheduler.drafting
            rounds, num_right = Counter(drafting.rounds), drafting.num_accepted
            num_answers = number * len(LENGTHS) if number > 1 else 1
            turns = compare(subject, engines, num_answers, tokens, repeats, temperature)
            rounds, num_right = drafting.rounds - rounds, drafting.num_accepted - num_right
            limit = drafting.limit(rounds, num_right, number)
            rows.append(
                {
                    "sequences": number,
                    "temperature": temperature,
                    **gain(turns),
                    **drafted(rounds, num_right),
                    "limit": limit,
                }
            )
            said = [token_ids for timing in turns["dense"] for token_ids, _ in timing.generated if temperature]
            seeds = range(num_answers, num_answers + len(said))  # turn 0 is not counted
            texts += [prompt(subject, seed) + token_ids for seed, token_ids in zip(seeds, said, strict=True)]
    found = agreement(subject.model, texts)
    return {"tokens": tokens, "repeats": repeats, "rows": rows, "exits": found}


def original_of(model: NviumForCausalLM) -> NviumForCausalLM:
    """The model with its last exit alone, sharing its weights, without its adapter if that adds nothing; no drafter."""
    last, config = f"exits.{model.config.num_exits - 1}.", univium_config(model.config)
    own = {name: weight for name, weight in model.state_dict().items() if name.startswith(last)}
    if any("down" in name and weight.any() for name, weight in own.items()):
        config.adapter_hidden_size = model.config.adapter_hidden_size
    original = NviumForCausalLM(config).eval()
    weights = {name.replace(last, "exits.0."): weight for name, weight in model.state_dict().items()}
    original.load_state_dict({name: weights[name] for name in original.state_dict()}, assign=True)
    return original


def compare(
    subject: Subject, engines: dict[str, Engine], num_answers: int, num_tokens: int, repeats: int, temperature: float
) -> dict[str, list[Timed]]:
    def run(engine: Engine, turn: int) -> Timed:
        seeds = range(turn * num_answers, (turn + 1) * num_answers)
        lengths = cycle(LENGTHS) if num_answers > 1 else [1.0]
        asked = SamplingParams(temperature=temperature, sampling="original", ignore_eos=not subject.chats)
        requests = [
            (prompt(subject, seed), replace(asked, seed=seed, max_tokens=round(num_tokens * length)))
            for seed, length in zip(seeds, lengths, strict=False)
        ]
        return timed(engine, requests)

    def run_undrafted(turn: int) -> Timed:
        with undrafted(engines["lossless"]):
            return run(engines["lossless"], turn)

    contenders = {name: partial(run, engine) for name, engine in engines.items()} | {"undrafted": run_undrafted}
    return interleaved(contenders, repeats, f"{num_answers} answers at {temperature:g}")


@contextmanager
def undrafted(engine: Engine) -> Iterator[None]:
    """The engine drafts nothing, and learns nothing about drafts, for as long. It reads the same memory as with them,
    which another engine does not."""
    drafting, engine.scheduler.drafting = engine.scheduler.drafting, Drafting.never()
    try:
        yield
    finally:
        engine.scheduler.drafting = drafting


def prompt(subject: Subject, seed: int) -> list[int]:
    """Another question for every seed, from a model that chats."""
    return subject.chats[seed % len(subject.chats)] if subject.chats else subject.prompt


def gain(turns: dict[str, list[Timed]]) -> Figures:
    rates = {name: [timing.tokens_per_second for timing in timings] for name, timings in turns.items()}
    said = {
        name: [token_ids for timing in timings for token_ids, _ in timing.generated] for name, timings in turns.items()
    }
    return {
        **{f"tokens_per_second_{name}": median(values) for name, values in rates.items()},
        "lossless_over_dense": median_ratio(rates["lossless"], rates["dense"]),
        "lossless_over_dense_in_all": in_all(turns["lossless"]) / in_all(turns["dense"]),
        "lossless_over_undrafted": median_ratio(rates["lossless"], rates["undrafted"]),
        "lossless_over_undrafted_in_all": in_all(turns["lossless"]) / in_all(turns["undrafted"]),
        "tokens_are_identical": all(each == said["dense"] for each in said.values()),
        "turns": {
            name: [
                {"tokens": each.num_tokens, "seconds": each.seconds, "processor_seconds": each.processor_seconds}
                for each in timings
            ]
            for name, timings in turns.items()
        },
    }


def drafted(rounds: Counter[tuple[int, int]], num_right: int) -> Figures:
    """By whom, in all turns, and how much of it was right."""
    drafts = Counter[str]()
    for (source, number), times in rounds.items():
        if number:
            drafts[name_of(source)] += number * times
    return {
        "drafts": drafts,
        "drafts_right": num_right / max(1, drafts.total()),
        "tokens_a_round": (rounds.total() + num_right) / rounds.total(),
    }


def in_all(timings: list[Timed]) -> float:
    """Tokens per second of all turns: where only some texts repeat themselves, the median turn does not show it."""
    num_tokens = sum(len(token_ids) for timing in timings for token_ids, _ in timing.generated)
    return num_tokens / sum(timing.seconds for timing in timings)


def name_of(source: int) -> str:
    """Who drafted."""
    if source == DRAFTER:
        return "drafter"
    return f"exit {source + 1}" if source >= 0 else "text"


@torch.inference_mode()
def agreement(model: NviumForCausalLM, texts: Sequence[list[int]]) -> list[Figures]:
    """Of each early exit, over all rows of the texts: the share that speculative sampling accepts, Σ min(π_k, π_N); and
    that is the same token by a race over the same numbers, or by one uniform through both distribution functions."""
    found: list[list[Tensor]] = [[] for _ in model.exits[:-1]]
    for number, text in enumerate(texts):
        positions = torch.arange(len(text))
        states = model.hidden_states(torch.tensor([text]), positions[None], causal_attention())
        outputs = [o_BTD[0] for o_BTD in model.exit_outputs(states)[1]]
        for rows in positions.split(ROWS_AT_ONCE):
            *early, last_RV = (model.lm_head(o_TD[rows]).double() for o_TD in outputs)
            uniforms = [uniform(number, 0, int(position), 0, TOKEN) for position in rows]
            for exit_, logits_RV in zip(found, early, strict=True):
                exit_.append(agreements(logits_RV, last_RV, uniforms))
    means = [torch.cat(exit_).mean(0).tolist() for exit_ in found]
    layers = model.config.exit_layers or []
    names = "speculative_sampling", "race", "one_uniform"
    return [{"layer": layer} | dict(zip(names, mean, strict=True)) for layer, mean in zip(layers, means, strict=False)]


def agreements(logits_RV: Tensor, last_RV: Tensor, uniforms: Sequence[float]) -> Tensor:
    """[R, 3]."""
    draws = [SamplingParams(sampling="original").draw] * len(uniforms)
    uniform_R = torch.tensor(uniforms, dtype=torch.float64)
    q_RV, p_RV = logits_RV.softmax(-1), last_RV.softmax(-1)
    race, last_race = (torch.tensor(draw_by_race(x_RV, draws, uniforms)) for x_RV in (logits_RV, last_RV))
    inverted = inverse_cdf(q_RV, uniform_R) == inverse_cdf(p_RV, uniform_R)
    return torch.stack([torch.minimum(q_RV, p_RV).sum(-1), (race == last_race).double(), inverted.double()], 1)


def table(figures: Figures) -> Table:
    names = (
        *("lossless_over_dense", "lossless_over_dense_in_all", "lossless_over_undrafted"),
        *("limit", "tokens_a_round", "drafts_right"),
    )
    headings = "over dense", "in all", "over no drafts", "limit of all", "tokens a round", "drafts right", "drafted by"
    result = Table("sequences", "temperature", *headings)
    for row in figures["rows"]:
        numbers = (row[name] for name in names)
        by = ", ".join(f"{name} {number}" for name, number in row["drafts"].items())
        asked = str(row["sequences"]), f"{row['temperature']:g}"
        result.add_row(*asked, *(f"{number:.3g}" for number in numbers), by)
    return result
