"""Plots the engine's samples against the expected distribution.

    python docs/figures/exactness.py docs/figures/exactness.png --draws 20000 --stories 200

The expected distribution comes from a full-depth forward pass, the samples from the engine with its default schedule:
many concurrent sequences, with deferred layers.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.stats import chi2, chisquare  # type: ignore[import-untyped]
from torch import Tensor

from nvium_core import Completion, Engine, EngineConfig, LoadedModel, SamplingParams, load_model
from nvium_core.model.nvium import Nvium

PROMPT = "She opened the door and saw a"
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9")
"""Okabe and Ito's palette for colour-blind readers."""

NUM_SHOWN = 10
MIN_EXPECTED = 10
"""Cells with fewer expected draws are merged or not plotted."""

EDGES = np.logspace(-5, 0, 11)


def concurrent_engine(model: Nvium) -> Engine:
    return Engine(model, EngineConfig(max_sequences=32, cache_tokens=32 * model.config.max_position_embeddings))


@torch.no_grad()
def explicit_joint(model: Nvium, token_ids: Sequence[int]) -> Tensor:
    """Compute p_k π_k(v) after every token, [T, E, V]."""
    out = model(torch.tensor([list(token_ids)]), output_exit_logits=True)
    return (out.exit_probs[0, ..., None] * out.exit_logits[0].double().softmax(-1)).double()


def first_tokens(model: Nvium, prompt: Sequence[int], num_draws: int) -> Tensor:
    """Count how often each exit emitted each token after the prompt, [E, V]."""
    counts_EV = torch.zeros(model.config.num_exits, model.config.vocab_size, dtype=torch.float64)
    engine = concurrent_engine(model)
    for seed in range(num_draws):
        engine.add(str(seed), prompt, SamplingParams(max_tokens=1, seed=seed))
    while engine.has_work:
        for event in engine.step():
            counts_EV[event.exit - 1, event.token_id] += 1  # type: ignore[union-attr]
    return counts_EV


def p_value(counts_EV: Tensor, joint_EV: Tensor) -> float:
    """Return the p-value of a χ² test."""
    expected_EV = joint_EV * counts_EV.sum()
    rare = expected_EV < MIN_EXPECTED
    observed = [*counts_EV[~rare].tolist(), float(counts_EV[rare].sum())]
    expected = [*expected_EV[~rare].tolist(), float(expected_EV[rare].sum())]
    return float(chisquare(observed, expected, sum_check=False).pvalue)


def stories(model: Nvium, prompt: Sequence[int], number: int, num_tokens: int) -> list[Completion]:
    params = SamplingParams(max_tokens=num_tokens, seed=1, n=number, ignore_eos=True)
    return concurrent_engine(model).generate([prompt], params)


@dataclass
class Agreement:
    """Token counts in cells C, one for each exit and bin of p_k π_k(v)."""

    observed_C: Tensor
    expected_C: Tensor
    covariance_CC: Tensor

    @property
    def p_value(self) -> float:
        """The p-value of a χ² test over all cells with enough expected tokens."""
        enough = self.expected_C >= MIN_EXPECTED
        off_C = (self.observed_C - self.expected_C)[enough]
        squared = off_C @ torch.linalg.solve(self.covariance_CC[enough][:, enough], off_C)
        return float(chi2.sf(float(squared), len(off_C)))


def agreement(model: Nvium, prompt: Sequence[int], completions: Sequence[Completion]) -> Agreement:
    """Compare every token with the joint distribution at its position, given the preceding text."""
    num_bins = len(EDGES) - 1
    num_cells = model.config.num_exits * num_bins
    observed_C, expected_C = torch.zeros(2, num_cells, dtype=torch.float64)
    product_CC = torch.zeros(num_cells, num_cells, dtype=torch.float64)
    edges = torch.tensor(EDGES)
    for story in completions:
        joint_TEV = explicit_joint(model, [*prompt, *story.token_ids])[len(prompt) - 1 : -1]
        bins_TEV = torch.bucketize(joint_TEV, edges) - 1
        mass_TEB = torch.stack([(joint_TEV * (bins_TEV == number)).sum(-1) for number in range(num_bins)], dim=-1)
        mass_TC = mass_TEB.flatten(1)
        expected_C += mass_TC.sum(0)
        product_CC += mass_TC.T @ mass_TC
        for place, (token, exit_) in enumerate(zip(story.token_ids, story.exits, strict=True)):
            number = int(bins_TEV[place, exit_ - 1, token])
            if number >= 0:
                observed_C[(exit_ - 1) * num_bins + number] += 1
    return Agreement(observed_C, expected_C, expected_C.diag() - product_CC)


def draw_exactness(
    loaded: LoadedModel, counts_EV: Tensor, joint_EV: Tensor, sums: Agreement, num_stories: int
) -> Figure:
    figure = Figure((10, 4.8), dpi=100, layout="constrained")
    tokens, places = figure.subplots(1, 2)
    draw_tokens(tokens, loaded, counts_EV, joint_EV)
    draw_agreement(places, sums, num_stories)
    return figure


def draw_tokens(panel: Axes, loaded: LoadedModel, counts_EV: Tensor, joint_EV: Tensor) -> None:
    """Plot the most probable next tokens: p_k π_k in the upper bar, sampled shares in the lower."""
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
    panel.set_xlabel("full colour: probability $p_k \\pi_k(v)$, pale: share of draws")
    panel.set_title(f"“{PROMPT} …”: {int(counts_EV.sum()):,} draws, χ² p = {p_value(counts_EV, joint_EV):.2f}", size=10)
    panel.legend(loc="lower right")


def draw_agreement(panel: Axes, sums: Agreement, num_stories: int) -> None:
    """Plot observed over expected counts by the joint probability of exit and token."""
    num_bins = len(EDGES) - 1
    middles = np.sqrt(EDGES[:-1] * EDGES[1:])
    observed_EB, expected_EB = (sums_C.reshape(-1, num_bins).numpy() for sums_C in (sums.observed_C, sums.expected_C))
    deviation_EB = sums.covariance_CC.diag().sqrt().reshape(-1, num_bins).numpy()
    for exit_, expected in enumerate(expected_EB):
        is_enough = expected >= MIN_EXPECTED
        ratio = observed_EB[exit_][is_enough] / expected[is_enough]
        bars = 1.96 * deviation_EB[exit_][is_enough] / expected[is_enough]
        at = middles[is_enough] * 1.08 ** (exit_ - 1.5)
        panel.errorbar(at, ratio, bars, fmt="o", color=COLOURS[exit_ % len(COLOURS)], markersize=4, capsize=2)
    panel.axhline(1, color="black", linewidth=1)
    panel.set_xscale("log")
    panel.set_xlim(EDGES[0], EDGES[-1])
    panel.grid(alpha=0.3)
    panel.set_xlabel("$p_k \\pi_k(v)$ from a full forward pass")
    panel.set_ylabel("tokens observed / expected, with 95% intervals")
    num_tokens = int(sums.observed_C.sum())
    panel.set_title(f"{num_stories} concurrent stories: {num_tokens:,} tokens, χ² p = {sums.p_value:.2f}", size=10)


def main(arguments: Sequence[str] | None = None) -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("file", type=Path)
    options.add_argument("--model", help="a folder or Hub name [the bundled model]")
    options.add_argument("--draws", type=int, default=20_000, help="next tokens sampled after one prompt")
    options.add_argument("--stories", type=int, default=200)
    options.add_argument("--tokens", type=int, default=128, help="tokens per story")
    given = options.parse_args(arguments)

    loaded = load_model(given.model, "cpu", "float32")
    prompt = loaded.tokenizer(PROMPT).input_ids
    counts_EV = first_tokens(loaded.model, prompt, given.draws)
    sums = agreement(loaded.model, prompt, stories(loaded.model, prompt, given.stories, given.tokens))
    joint_EV = explicit_joint(loaded.model, prompt)[-1]
    draw_exactness(loaded, counts_EV, joint_EV, sums, given.stories).savefig(given.file)


if __name__ == "__main__":
    main()
