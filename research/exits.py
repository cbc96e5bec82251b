"""Speed by depth: a model with its exits over its last exit alone, `python -m research.exits --model MODEL`.

All routers are shifted together to each mean depth, measured on text of the last exit alone. The reported depth is that
of the tokens that were timed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import median

import torch
from rich.table import Table
from torch import Tensor

from nvium_core.bench.harness import Figures, Subject, Timed, interleaved, median_ratio, timed
from nvium_core.engine.engine import Engine
from nvium_core.engine.params import EngineConfig, SamplingParams
from nvium_core.model.llama import causal_attention
from nvium_core.model.nvium import Nvium
from nvium_core.model.univium import univium_config
from nvium_core.training.retrofitting.steering import log_odds, shift_to, shifted
from research.measuring import load, numbers, parser, report, requests, seeds

DEPTHS = (0.9, 0.85, 0.8)
NUM_TEXTS = 4


def last_exit_of(model: Nvium) -> Nvium:
    """The model with its last exit alone, sharing its weights; without the adapter if that adds nothing."""
    last, config = f"exits.{model.config.num_exits - 1}.", univium_config(model.config)
    own = {name: weight for name, weight in model.state_dict().items() if name.startswith(last)}
    if any("down" in name and weight.any() for name, weight in own.items()):
        config.adapter_hidden_size = model.config.adapter_hidden_size
    original = Nvium(config).eval()
    weights = {name.replace(last, "exits.0."): weight for name, weight in model.state_dict().items()}
    original.load_state_dict({name: weights[name] for name in original.state_dict()}, assign=True)
    return original


def measure(subject: Subject, sequences: Sequence[int], depths: Sequence[float], tokens: int, repeats: int) -> Figures:
    """A row for each number of sequences and depth."""
    asked = SamplingParams(max_tokens=tokens, sampling="exits", ignore_eos=True)
    layers, original = subject.model.config.exit_layers or [], last_exit_of(subject.model)
    log_odds_RK = text_log_odds(subject.model, original_texts(subject, original, asked))
    rows = []
    for number in sequences:
        config = EngineConfig(max_sequences=number, prefix_caching=False)
        dense = Engine(original, config)
        for depth in depths:
            shift = shift_to(depth, log_odds_RK, layers)
            with shifted(subject.model, shift):
                contenders = {
                    name: partial(generate, engine, subject.prompt, asked, number)
                    for name, engine in {"early": Engine(subject.model, config), "dense": dense}.items()
                }
                turns = interleaved(contenders, repeats, f"{number} sequences, depth {depth:g}")
            rows.append({"sequences": number, "asked_depth": depth, "shift": shift, **speeds(turns, layers)})
    return {"tokens": tokens, "repeats": repeats, "rows": rows}


def generate(engine: Engine, prompt: list[int], asked: SamplingParams, number: int, turn: int) -> Timed:
    return timed(engine, requests(prompt, [replace(asked, seed=seed) for seed in seeds(turn, number)]))


def original_texts(subject: Subject, original: Nvium, asked: SamplingParams) -> list[list[int]]:
    """Text of the last exit alone, from seeds that no turn uses."""
    engine = Engine(original, EngineConfig(max_sequences=NUM_TEXTS, prefix_caching=False))
    params = [replace(asked, seed=-seed - 1) for seed in range(NUM_TEXTS)]
    return [subject.prompt + token_ids for token_ids, _ in timed(engine, requests(subject.prompt, params)).generated]


@torch.inference_mode()
def text_log_odds(model: Nvium, texts: Sequence[list[int]]) -> Tensor:
    """Of exiting, for all rows of the texts, [R, K]."""
    parts = []
    for text in texts:
        token_BT = torch.tensor([text], device=model.device)
        positions_BT = torch.arange(len(text), device=model.device)[None]
        log_w_BTE2, _ = model.exit_outputs(model.hidden_states(token_BT, positions_BT, causal_attention()))
        parts.append(log_odds(log_w_BTE2[0, :, :-1]))
    return torch.cat(parts)


def speeds(turns: Mapping[str, Sequence[Timed]], layers: Sequence[int]) -> Figures:
    """Rates, their median ratio, and depth and routing of the timed tokens."""
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
    result = Table("sequences", "asked depth", "depth", "tokens/s", "last exit's tokens/s", "ratio")
    names = "depth", "tokens_per_second_early", "tokens_per_second_dense", "ratio"
    for row in figures["rows"]:
        values = (f"{row[name]:.3g}" for name in names)
        result.add_row(str(row["sequences"]), f"{row['asked_depth']:g}", *values)
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser("exits", __doc__)
    options.add_argument("--sequences", type=numbers, default="1", help="concurrent sequences: N,N…")
    options.add_argument("--depths", type=lambda text: [float(part) for part in text.split(",")], default=DEPTHS)
    options.add_argument("--tokens", type=int, default=128, help="per sequence")
    asked = options.parse_args(arguments)
    subject = load(asked)
    figures = measure(subject, asked.sequences, asked.depths, asked.tokens, asked.repeats)
    report(subject, figures, table(figures), asked.json)


if __name__ == "__main__":
    main()
