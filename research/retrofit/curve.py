"""Compare a retrofitted model with the original at several depths: perplexity of the mixture, and answers.

    python -m research.retrofit.curve BASE --exits EXITS --text conversations=EXITS/retrofit/self_talk.jsonl \\
        --unseen tales=tales.txt --json curve.json --plot curve.png

The original is the last exit. `--text` names a text of the retrofit, of which only the held-out end is measured.
`--unseen` names another text, all of which is measured. For each depth, the log-odds of all routers are shifted by one
constant. Intervals contain 95% of bootstrap samples of the documents. Mixture and original share the samples. Questions
are answered at temperature 0, with the shifts found on the first text.

Shapes: R rows, C rows of a chunk, E exits, D width, V vocabulary, S shifts.
"""

import math
import re
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn import functional as F

from nvium_core.bench.figures import Figures, write_json
from nvium_core.choices import Sampling
from nvium_core.engine.config import EngineConfig
from nvium_core.engine.device.processor import use_processor
from nvium_core.engine.engine import Engine
from nvium_core.engine.sampling_params import SamplingParams
from nvium_core.evaluation.suite import Sample, description, interval, perplexity_price
from nvium_core.loading import LoadedModel, load_model
from nvium_core.model import mixture
from nvium_core.model.llama import causal_attention
from nvium_core.model.nvium import Nvium
from nvium_core.training.data.texts import Example, prompt_tokens, user
from nvium_core.training.retrofitting.model import log_odds, shift_to, shifted_log_exit_probs
from nvium_core.training.retrofitting.retrofit import MAX_CONTEXT
from nvium_core.training.retrofitting.texts import document_numbers, read_text
from research.plots import label, sheet
from research.retrofit.exits import shifted

DEPTHS = (0.95, 0.9, 0.85, 0.8, 0.75, 0.7)
ANSWERED_DEPTHS = (0.9, 0.85, 0.8)

MOST_TOKENS = 10_000_000
"""Maximum number of tokens to read from a text of documents."""

CHUNK_ROWS = 64


class Rows(NamedTuple):
    """The measured rows of a text. `outputs_RED` are the head's inputs, and `document_R` are the rows' documents."""

    log_odds_RE: Tensor
    outputs_RED: Tensor
    target_R: Tensor
    document_R: Tensor


class RowScores(NamedTuple):
    """−log π_k of the targets, for every exit and for the original. `same_RS`: π_mix has the original's argmax."""

    nll_RE: Tensor
    original_R: Tensor
    same_RS: Tensor


def curve(
    loaded: LoadedModel,
    path: Path,
    depths: Sequence[float] = DEPTHS,
    *,
    is_unseen: bool = False,
) -> Figures:
    """Measure the unshifted routers and each depth on a text's held-out end or, if `is_unseen`, on the whole text."""
    layers = loaded.model.config.exit_layers or []
    context = min(MAX_CONTEXT, loaded.model.config.max_position_embeddings)
    text = read_text(path, loaded.tokenizer, context, MOST_TOKENS)
    rows = rows_of(loaded.model, [*text.training, *text.held_out] if is_unseen else text.held_out)
    shifts = [0.0, *(shift_to(depth, rows.log_odds_RE, layers) for depth in depths)]
    log_p = [shifted_log_exit_probs(rows.log_odds_RE.double(), shift) for shift in shifts]
    scores = score_rows(loaded.model, rows, torch.stack([log_p_RE.exp().float() for log_p_RE in log_p], 1))
    same = scores.same_RS.unbind(1)
    found = [point(layers, rows, scores, *each) for each in zip(shifts, log_p, same, strict=True)]
    points = [{"asked_depth": depth} | each for depth, each in zip([None, *depths], found, strict=True)]
    return {
        "tokens": len(rows.target_R),
        "documents": int(rows.document_R[-1]) + 1,
        "original_perplexity": math.exp(scores.original_R.mean()),
        "exit_perplexities": scores.nll_RE.mean(0).exp().tolist(),
        "points": points,
    }


@torch.inference_mode()
def rows_of(model: Nvium, examples: Sequence[Example]) -> Rows:
    parts = []
    for number, each in zip(document_numbers(examples), examples, strict=True):
        ids_BT, counted_T = torch.from_numpy(each.tokens)[None], torch.from_numpy(each.is_answer[1:])
        positions_BT = torch.arange(len(each) - 1)[None]
        states = model.hidden_states(ids_BT[:, :-1], positions_BT, causal_attention())
        log_w_RE2, outputs = model.exit_outputs([h_BTD[0, counted_T] for h_BTD in states])
        target_R = ids_BT[0, 1:][counted_T]
        documents_R = torch.full_like(target_R, number)
        parts.append((log_odds(log_w_RE2), torch.stack(outputs, 1), target_R, documents_R))
    return Rows(*map(torch.cat, zip(*parts, strict=True)))


@torch.inference_mode()
def score_rows(model: Nvium, rows: Rows, p_RSE: Tensor) -> RowScores:
    head_VD = model.lm_head.weight.float()
    chunks = zip(*(x.split(CHUNK_ROWS) for x in (*rows[1:3], p_RSE)), strict=True)
    return RowScores(*map(torch.cat, zip(*(_score_chunk(head_VD, *chunk) for chunk in chunks), strict=True)))


def _score_chunk(
    head_VD: Tensor, outputs_CED: Tensor, target_C: Tensor, p_CSE: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    log_CEV = F.linear(outputs_CED.float(), head_VD).log_softmax(-1)
    nll_CE = -log_CEV.gather(2, target_C[:, None, None].expand(-1, log_CEV.shape[1], 1)).squeeze(2).double()
    same_CS = (p_CSE @ log_CEV.exp()).argmax(-1) == log_CEV[:, -1].argmax(-1, keepdim=True)
    return nll_CE, nll_CE[:, -1], same_CS


def point(
    layers: Sequence[int], rows: Rows, scores: RowScores, shift: float, log_p_RE: Tensor, same_R: Tensor
) -> Figures:
    mix_R = mixture.mixture_nll(log_p_RE, scores.nll_RE)
    tokens, mixed, original, same = (
        rows.document_R.bincount(x_R.double()).tolist()
        for x_R in (torch.ones_like(mix_R), mix_R, scores.original_R, same_R)
    )
    ours, others = (
        {"perplexity": math.exp(sum(losses) / sum(tokens)), "document_tokens": tokens, "document_losses": losses}
        for losses in (mixed, original)
    )
    return {
        "shift": shift,
        "depth": float(mixture.mean_depth(log_p_RE, layers).mean()),
        "exit_shares": log_p_RE.exp().mean(0).tolist(),
        "perplexity": ours["perplexity"],
        **perplexity_price(ours, others),
        "same_argmax": sum(same) / sum(tokens),
        "same_argmax_interval": share_interval(same, tokens),
    }


def share_interval(counts: Sequence[float], tokens: Sequence[float]) -> list[float] | None:
    """Return the interval of a share of tokens, by bootstrap over documents."""

    def shares(samples: list[Sample]) -> np.ndarray:
        found: np.ndarray = np.asarray(counts)[samples[0]].sum(1) / np.asarray(tokens)[samples[0]].sum(1)
        return found

    found = interval([len(tokens)], shares)
    return found and list(found)


QUESTIONS = {
    "What is the capital of France?": "Paris",
    "How many days are there in a week?": "seven|7",
    "What colour is the sky on a clear day?": "blue",
    "Which planet do we live on?": "Earth",
    "What do bees make that people eat?": "honey",
    "What is two plus three?": "five|5",
    "What is frozen water called?": "ice",
    "Which season comes after winter?": "spring",
    "Which animal says meow?": "cats?",
    "What is the opposite of hot?": "cold",
}
"""Questions, each with a regular expression for the right answer."""

MAX_TOKENS = 48


def answers(loaded: LoadedModel, points: Sequence[Figures]) -> Figures:
    """Answer the questions with the original (the last exit) and with the mixture at every point."""
    original = answered(loaded, "original")
    rows = []
    for point in points:
        with shifted(loaded.model, point["shift"]):
            given = answered(loaded, "exits")
        equal = sum(one == other for one, other in zip(given, original, strict=True))
        rows.append({"depth": point["depth"], "equal": equal, "right": num_right(given), "answers": given})
    return {
        "max_tokens": MAX_TOKENS,
        "questions": list(QUESTIONS),
        "original": {"right": num_right(original), "answers": original},
        "mixture": rows,
    }


def answered(loaded: LoadedModel, sampling: Sampling) -> list[str]:
    ends = (loaded.tokenizer.eos_token_id,)
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0, sampling=sampling, stop_token_ids=ends)
    engine = Engine(loaded.model, EngineConfig(max_sequences=len(QUESTIONS)))
    completions = engine.generate([prompt_tokens([user(question)], loaded.tokenizer) for question in QUESTIONS], params)
    return [str(loaded.tokenizer.decode(each.token_ids, skip_special_tokens=True)).strip() for each in completions]


def num_right(given: Sequence[str]) -> int:
    pairs = zip(QUESTIONS.values(), given, strict=True)
    return sum(bool(re.search(rf"\b(?:{word})\b", answer, re.IGNORECASE)) for word, answer in pairs)


def plot(figures: Figures) -> Figure:
    """Plot, by depth, the mixture's perplexity increase over the original, and how often both have the same argmax."""
    figure, [price, same] = sheet(figures, 2)
    for name, text in figures["texts"].items():
        points = [point for point in text["points"] if point["asked_depth"]]
        bars(price, name, points, "price_percent", "price_interval_percent")
        bars(same, name, points, "same_argmax", "same_argmax_interval")
    price.axhline(0, color="black", linewidth=1)
    label(price, "mean depth", "perplexity above the original, %")
    label(same, "mean depth", "share of tokens with the original's argmax")
    return figure


def bars(panel: Axes, name: str, points: Sequence[Figures], what: str, bounds: str) -> None:
    values = [point[what] for point in points]
    ends = [point[bounds] or [value, value] for point, value in zip(points, values, strict=True)]
    sides = np.abs(np.transpose(ends) - values)
    panel.errorbar([point["depth"] for point in points], values, yerr=sides, fmt="o-", capsize=4, label=name)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(prog="python -m research.retrofit.curve", description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--exits", help="folder or Hub name of exits made for the model")
    parser.add_argument(
        "--text",
        action="append",
        default=[],
        metavar="NAME=FILE",
        help="text of the retrofit, whose held-out end is measured",
    )
    parser.add_argument(
        "--unseen", action="append", default=[], metavar="NAME=FILE", help="other text, all of which is measured"
    )
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--threads", default="auto")
    args = parser.parse_args(arguments)
    if not args.text + args.unseen:
        parser.error("name a text: --text or --unseen NAME=FILE")
    use_processor("auto", args.threads)
    loaded = load_model(args.model, "cpu", exits=args.exits)
    texts = {}
    for text in args.text + args.unseen:
        name, _, file = text.partition("=")
        texts[name] = curve(loaded, Path(file), is_unseen=text in args.unseen)
    found = description(loaded) | {"texts": texts}
    if loaded.tokenizer.chat_template:
        points = next(iter(texts.values()))["points"]
        found["answers"] = answers(loaded, [each for each in points if each["asked_depth"] in ANSWERED_DEPTHS])
    write_json(found, args.json)
    if args.plot:
        plot(found).savefig(args.plot)


if __name__ == "__main__":
    main()
