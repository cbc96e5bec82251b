"""Draws the engine's samples against the formulas, and the staircase of one sequence.

    python docs/figures/exactness.py docs/figures --draws 20000 --stories 200

The formulas are computed from a full-depth forward pass. Tokens come from the engine with its default schedule: many
sequences at a time, with deferred layers. Writes exactness.png and steps.png.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from scipy.stats import chi2, chisquare  # type: ignore[import-untyped]
from torch import Tensor

from nvium_core import Completion, Engine, EngineConfig, LoadedModel, SamplingParams, load_model
from nvium_core.model.nvium import Nvium

PROMPT = "The old king had three"
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9")
"""Okabe and Ito's palette for colour-blind readers."""

NUM_SHOWN = 10
FEWEST = 10
"""Cells and bins that expect fewer draws are merged, or not drawn."""

EDGES = np.logspace(-5, 0, 11)


def together(model: Nvium) -> Engine:
    return Engine(model, EngineConfig(max_sequences=32, cache_tokens=32 * model.config.max_position_embeddings))


@torch.no_grad()
def explicit_joint(model: Nvium, token_ids: Sequence[int]) -> Tensor:
    """p_k π_k(v) after every token, [T, E, V]."""
    out = model(torch.tensor([list(token_ids)]), output_exit_logits=True)
    return (out.exit_probs[0, ..., None] * out.exit_logits[0].double().softmax(-1)).double()


def first_tokens(model: Nvium, prompt: Sequence[int], num_draws: int) -> Tensor:
    """How often each exit emitted each token after the prompt, [E, V]."""
    counts_EV = torch.zeros(model.config.num_exits, model.config.vocab_size, dtype=torch.float64)
    engine = together(model)
    for seed in range(num_draws):
        engine.add(str(seed), prompt, SamplingParams(max_tokens=1, seed=seed))
    while engine.has_work:
        for event in engine.step():
            counts_EV[event.exit - 1, event.token_id] += 1  # type: ignore[union-attr]
    return counts_EV


def p_value(counts_EV: Tensor, joint_EV: Tensor) -> float:
    """How often an exact sampler would deviate more (χ²)."""
    expected_EV = joint_EV * counts_EV.sum()
    rare = expected_EV < FEWEST
    observed = [*counts_EV[~rare].tolist(), float(counts_EV[rare].sum())]
    expected = [*expected_EV[~rare].tolist(), float(expected_EV[rare].sum())]
    return float(chisquare(observed, expected, sum_check=False).pvalue)


def stories(model: Nvium, prompt: Sequence[int], number: int, num_tokens: int) -> list[Completion]:
    params = SamplingParams(max_tokens=num_tokens, seed=1, n=number, ignore_eos=True)
    return together(model).generate([prompt], params)


@dataclass
class Agreement:
    """Tokens by exit and by the p_k π_k of the token: counts, exit by exit, bin by bin."""

    seen_C: Tensor
    expected_C: Tensor
    covariance_CC: Tensor

    @property
    def p_value(self) -> float:
        """How often an exact sampler would deviate more, over all cells that expect enough."""
        enough = self.expected_C >= FEWEST
        off_C = (self.seen_C - self.expected_C)[enough]
        squared = off_C @ torch.linalg.solve(self.covariance_CC[enough][:, enough], off_C)
        return float(chi2.sf(float(squared), len(off_C)))


def agreement(model: Nvium, prompt: Sequence[int], told: Sequence[Completion]) -> Agreement:
    """Every token of every story against the joint distribution at its position, given the text before it."""
    num_bins = len(EDGES) - 1
    num_cells = model.config.num_exits * num_bins
    seen_C, expected_C = torch.zeros(2, num_cells, dtype=torch.float64)
    together_CC = torch.zeros(num_cells, num_cells, dtype=torch.float64)
    edges = torch.tensor(EDGES)
    for story in told:
        joint_TEV = explicit_joint(model, [*prompt, *story.token_ids])[len(prompt) - 1 : -1]
        bins_TEV = torch.bucketize(joint_TEV, edges) - 1
        mass_TEB = torch.stack([(joint_TEV * (bins_TEV == number)).sum(-1) for number in range(num_bins)], dim=-1)
        mass_TC = mass_TEB.flatten(1)
        expected_C += mass_TC.sum(0)
        together_CC += mass_TC.T @ mass_TC
        for place, (token, exit_) in enumerate(zip(story.token_ids, story.exits, strict=True)):
            number = int(bins_TEV[place, exit_ - 1, token])
            if number >= 0:
                seen_C[(exit_ - 1) * num_bins + number] += 1
    return Agreement(seen_C, expected_C, expected_C.diag() - together_CC)


@dataclass(frozen=True)
class Run:
    """A Step of a lone sequence: the rows its block ran, and whether its last row emitted."""

    block: int
    rows: range
    spoke: bool


def lone_runs(model: Nvium, prompt: Sequence[int], num_tokens: int, seed: int) -> list[Run]:
    """The engine's Steps, in order. Every block runs all its pending rows."""
    engine = Engine(model, EngineConfig(schedule="sweep", max_sequences=1))
    engine.scheduler.tokens_ahead = 0
    engine.add("alone", prompt, SamplingParams(max_tokens=num_tokens, seed=seed, ignore_eos=True))
    filled, runs = [0] * model.config.num_exits, []
    while engine.has_work:
        events = engine.step()
        for report in engine.reports:
            begin = filled[report.block - 1]
            filled[report.block - 1] += report.num_rows
            spoke = bool(events) and report is engine.reports[-1]
            runs.append(Run(report.block, range(begin, begin + report.num_rows), spoke))
    return runs


def draw_exactness(
    loaded: LoadedModel, counts_EV: Tensor, joint_EV: Tensor, sums: Agreement, num_stories: int
) -> Figure:
    figure = Figure((10, 4.8), dpi=100, layout="constrained")
    tokens, places = figure.subplots(1, 2)
    draw_tokens(tokens, loaded, counts_EV, joint_EV)
    draw_agreement(places, sums, num_stories)
    return figure


def draw_tokens(panel: Axes, loaded: LoadedModel, counts_EV: Tensor, joint_EV: Tensor) -> None:
    """The most probable next tokens: a bar of p_k π_k above one of the draws."""
    shown = joint_EV.sum(0).argsort(descending=True)[:NUM_SHOWN].tolist()
    shares_EV = counts_EV / counts_EV.sum()
    for values_EV, offset, alpha in ((joint_EV, -0.2, 1.0), (shares_EV, 0.2, 0.45)):
        left = np.zeros(len(shown))
        for exit_, values_V in enumerate(values_EV):
            widths = values_V[shown].numpy()
            label = f"exit {exit_ + 1}" if alpha == 1 else None
            heights = np.arange(len(shown)) + offset
            panel.barh(heights, widths, 0.36, left, color=COLOURS[exit_ % len(COLOURS)], alpha=alpha, label=label)
            left += widths
    panel.set_yticks(range(len(shown)), [repr(loaded.tokenizer.decode([token])) for token in shown])
    panel.invert_yaxis()
    panel.set_xlabel("probability; full colour $p_k \\pi_k(v)$, pale: share of draws")
    panel.set_title(f"“{PROMPT} …”: {int(counts_EV.sum()):,} draws, χ² p = {p_value(counts_EV, joint_EV):.2f}", size=10)
    panel.legend(loc="lower right")


def draw_agreement(panel: Axes, sums: Agreement, num_stories: int) -> None:
    """Observed over expected, by the joint probability of exit and token."""
    num_bins = len(EDGES) - 1
    middles = np.sqrt(EDGES[:-1] * EDGES[1:])
    seen_EB, expected_EB = (sums_C.reshape(-1, num_bins).numpy() for sums_C in (sums.seen_C, sums.expected_C))
    deviation_EB = sums.covariance_CC.diag().sqrt().reshape(-1, num_bins).numpy()
    for exit_, expected in enumerate(expected_EB):
        is_enough = expected >= FEWEST
        ratio = seen_EB[exit_][is_enough] / expected[is_enough]
        bars = 1.96 * deviation_EB[exit_][is_enough] / expected[is_enough]
        at = middles[is_enough] * 1.08 ** (exit_ - 1.5)
        panel.errorbar(at, ratio, bars, fmt="o", color=COLOURS[exit_ % len(COLOURS)], markersize=4, capsize=2)
    panel.axhline(1, color="black", linewidth=1)
    panel.set_xscale("log")
    panel.set_xlim(EDGES[0], EDGES[-1])
    panel.grid(alpha=0.3)
    panel.set_xlabel("$p_k \\pi_k(v)$ at the token's place, whole text known")
    panel.set_ylabel("tokens spoken / expected, with 95% of chance")
    num_tokens = int(sums.seen_C.sum())
    panel.set_title(f"{num_stories} stories told at once: {num_tokens:,} tokens, χ² p = {sums.p_value:.2f}", size=10)


def draw_staircase(loaded: LoadedModel, runs: Sequence[Run], prompt: Sequence[int], token_ids: Sequence[int]) -> Figure:
    """A column for each row, a cell for each block; the number is the Step that ran it."""
    figure = Figure((10, 3.2), dpi=100, layout="constrained")
    panel = figure.subplots()
    for number, run in enumerate(runs, 1):
        for row in run.rows:
            is_front = row == run.rows[-1] and row >= len(prompt) - 1
            colour = to_rgba(COLOURS[(run.block - 1) % len(COLOURS)], 1 if run.spoke else 0.35)
            shade = colour if is_front else to_rgba("0.85")
            panel.add_patch(Rectangle((row, run.block - 0.5), 1, 1, facecolor=shade, edgecolor="white"))
            panel.text(row + 0.5, run.block, str(number), ha="center", va="center", size=8)
    text = [repr(loaded.tokenizer.decode([token]))[1:-1] for token in [*prompt, *token_ids]]
    num_rows = len(text) - 1
    panel.set_xlim(0, num_rows)
    panel.set_ylim(0.5, loaded.model.config.num_exits + 0.5)
    panel.set_xticks([row + 0.5 for row in range(num_rows)], text[:-1], rotation=60, size=8)
    panel.set_yticks(range(1, loaded.model.config.num_exits + 1))
    panel.set_ylabel("block")
    panel.set_title("numbers: Steps in order. Full colour: spoke; pale: asked, went on; grey: carried along", size=10)
    return figure


def main(arguments: Sequence[str] | None = None) -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("folder", type=Path)
    options.add_argument("--model", help="a folder or Hub name; the bundled model if left out")
    options.add_argument("--draws", type=int, default=20_000, help="next tokens behind one prompt")
    options.add_argument("--stories", type=int, default=200)
    options.add_argument("--tokens", type=int, default=128, help="of each story")
    asked = options.parse_args(arguments)

    loaded = load_model(asked.model, "cpu", "float32")
    prompt = loaded.tokenizer(PROMPT).input_ids
    counts_EV = first_tokens(loaded.model, prompt, asked.draws)
    told = stories(loaded.model, prompt, asked.stories, asked.tokens)
    sums = agreement(loaded.model, prompt, told)
    joint_EV = explicit_joint(loaded.model, prompt)[-1]
    draw_exactness(loaded, counts_EV, joint_EV, sums, asked.stories).savefig(asked.folder / "exactness.png")

    num_tokens, seed = 18, 2
    params = SamplingParams(max_tokens=num_tokens, seed=seed, ignore_eos=True)
    [spoken] = Engine(loaded.model, EngineConfig(max_sequences=1)).generate([prompt], params)
    runs = lone_runs(loaded.model, prompt, num_tokens, seed)
    picture = draw_staircase(loaded, runs, prompt, list(islice(spoken.token_ids, num_tokens)))
    picture.savefig(asked.folder / "steps.png")


if __name__ == "__main__":
    main()
