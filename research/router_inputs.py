"""Measure what routers of a retrofitted model gain from also knowing how sure their exit is.

    python -m research.router_inputs BASE --exits EXITS --text EXITS/retrofit/self_talk.jsonl --json inputs.json

Base and exits are frozen, so each row's losses are computed once. Then routers are trained on most of the text, with
−log π_mix and a penalty on depth, and measured on the rest, with their log-odds shifted to each depth. The exits were
trained on a part of the rest, so prices are a little low, for all inputs alike. The inputs:

- state: the exit's normed hidden state, as in nvium.
- state and top two: also the exit's two largest log-probabilities. They need the exit's head before its router.
- state and KL: also the KL from the last exit to this one. No router can know it: an optimistic estimate.

Shapes: R rows, D width, K early exits, E exits, F features.
"""

from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from nvium_core.bench.harness import Figures
from nvium_core.evaluation.suite import description, write_json
from nvium_core.loading import load_model
from nvium_core.model import mixture
from nvium_core.model.exits import Exit
from nvium_core.model.llama import causal_attention
from nvium_core.model.nvium import Nvium
from nvium_core.training.chat.examples import Example
from nvium_core.training.retrofitting.retrofit import MAX_CONTEXT
from nvium_core.training.retrofitting.router_shift import shift_to, shifted_log_exit_probs
from nvium_core.training.retrofitting.texts import read_text

DEPTHS = (0.9, 0.85, 0.8)
TRAINING_SHARE = 0.8
EPOCHS, BATCH_ROWS, RATE, WEIGHT_DECAY = 6, 256, 3e-4, 0.1
PENALTIES = (0.3, 0.6, 1.2)
"""β of the depth penalty. Each depth takes the price of the best of them on the measured rows."""


class Rows(NamedTuple):
    """The early exits' states [R, K, D], top two [R, K, 2] and KL [R, K, 1], and every exit's −log π_k [R, E]."""

    state: Tensor
    top_two: Tensor
    kl: Tensor
    nll: Tensor


INPUTS = {"state": (), "state and top two": ("top_two",), "state and KL": ("kl",)}


@torch.inference_mode()
def rows_of(model: Nvium, examples: Sequence[Example]) -> Rows:
    parts, head_VD = [], model.lm_head.weight
    exits = [exit_ for exit_ in model.exits if isinstance(exit_, Exit)]
    for each in examples:
        ids_BT, counted_T = torch.from_numpy(each.tokens)[None], torch.from_numpy(each.is_answer[1:])
        states = model.hidden_states(ids_BT[:, :-1], torch.arange(len(each) - 1)[None], causal_attention())
        normed = [exit_.norm(h_BTD[0, counted_T]) for exit_, h_BTD in zip(exits, states, strict=True)]
        outputs = [exit_.adapter(x_RD) for exit_, x_RD in zip(exits, normed, strict=True)]
        log_REV = torch.stack([(o_RD @ head_VD.T).log_softmax(-1) for o_RD in outputs], 1)
        target_RE1 = ids_BT[0, 1:][counted_T][:, None, None].expand(-1, len(exits), 1)
        kl_RE = (log_REV[:, -1:].exp() * (log_REV[:, -1:] - log_REV)).sum(-1)
        early = slice(0, len(exits) - 1)
        nll_RE = -log_REV.gather(2, target_RE1).squeeze(2)
        parts.append((torch.stack(normed[early], 1), log_REV[:, early].topk(2).values, kl_RE[:, early, None], nll_RE))
    return Rows(*map(torch.cat, zip(*parts, strict=True)))


class Routers(nn.Module):
    """An MLP for each early exit. Returns the log-odds of exiting."""

    def __init__(self, num_exits: int, width: int, num_features: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(
            nn.Sequential(nn.Linear(width + num_features, width), nn.GELU(), nn.Linear(width, 1))
            for _ in range(num_exits)
        )

    def forward(self, input_RKF: Tensor) -> Tensor:
        """Return log-odds [R, K]."""
        return torch.cat([part(input_RKF[:, number]) for number, part in enumerate(self.parts)], 1)


def input_of(rows: Rows, features: Sequence[str]) -> Tensor:
    return torch.cat([rows.state, *(getattr(rows, name) for name in features)], -1)


def trained_routers(rows: Rows, features: Sequence[str], penalty: float, layers: Sequence[int]) -> Routers:
    torch.manual_seed(0)
    input_RKF = input_of(rows, features)
    routers = Routers(input_RKF.shape[1], rows.state.shape[2], input_RKF.shape[2] - rows.state.shape[2])
    optimizer = torch.optim.AdamW(routers.parameters(), lr=RATE, weight_decay=WEIGHT_DECAY)
    num_steps = EPOCHS * len(input_RKF) // BATCH_ROWS
    decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, num_steps)
    for step in range(num_steps):
        chosen_R = torch.randint(len(input_RKF), (BATCH_ROWS,), generator=torch.Generator().manual_seed(step))
        log_p_RE = shifted_log_exit_probs(routers(input_RKF[chosen_R]), 0.0)
        loss_R = mixture.mixture_nll(log_p_RE, rows.nll[chosen_R]) + penalty * mixture.mean_depth(log_p_RE, layers)
        optimizer.zero_grad()
        loss_R.mean().backward()
        optimizer.step()
        decay.step()
    return routers


@torch.inference_mode()
def prices(log_odds_RK: Tensor, nll_RE: Tensor, layers: Sequence[int]) -> list[float]:
    """Return the increase in perplexity over the last exit in percent, at each of `DEPTHS`."""
    found = []
    for depth in DEPTHS:
        log_p_RE = shifted_log_exit_probs(log_odds_RK.double(), shift_to(depth, log_odds_RK, layers))
        gap_R = mixture.mixture_nll(log_p_RE, nll_RE.double()) - nll_RE[:, -1]
        found.append(100 * float(gap_R.mean().expm1()))
    return found


def compare(rows: Rows, held_out: Rows, layers: Sequence[int]) -> list[Figures]:
    """Train routers for every input and penalty. Return each input's lowest price at each depth."""
    found = []
    for name, features in INPUTS.items():
        by_penalty = []
        for penalty in PENALTIES:
            routers = trained_routers(rows, features, penalty, layers)
            with torch.inference_mode():
                by_penalty.append(prices(routers(input_of(held_out, features)), held_out.nll, layers))
        lowest = map(min, zip(*by_penalty, strict=True))
        found.append({"input": name, **{f"{depth:g}": price for depth, price in zip(DEPTHS, lowest, strict=True)}})
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(prog="python -m research.router_inputs", description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--exits", help="folder or Hub name of exits made for the model")
    parser.add_argument("--text", type=Path, required=True, help="conversations or text of the retrofit")
    parser.add_argument("--tokens", type=int, default=80_000, help="maximum number of tokens to read from a text")
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args(arguments)
    loaded = load_model(args.model, "cpu", exits=args.exits)
    context = min(MAX_CONTEXT, loaded.model.config.max_position_embeddings)
    text = read_text(args.text, loaded.tokenizer, context, args.tokens)
    examples = [*text.training, *text.held_out]
    first_held_out = round(TRAINING_SHARE * len(examples))
    rows, held_out = (rows_of(loaded.model, part) for part in (examples[:first_held_out], examples[first_held_out:]))
    found = compare(rows, held_out, loaded.model.config.exit_layers or [])
    counts = {"training_rows": len(rows.nll), "held_out_rows": len(held_out.nll)}
    write_json(description(loaded) | counts | {"rows": found}, args.json)


if __name__ == "__main__":
    main()
