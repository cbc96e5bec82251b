"""Check temperature 0 on a text: are certified tokens the argmax of the mixture, and how many exit early?

    python -m research.greedy MODEL --data valid.txt.xz

Shapes: T positions of a window, E exits, V vocabulary.
"""

from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from nvium_core.engine.device.sampling import certified_argmax
from nvium_core.evaluation.predictions import text_windows
from nvium_core.evaluation.suite import description, write_json
from nvium_core.loading import load_model
from nvium_core.model import mixture
from nvium_core.model.nvium import Nvium
from nvium_core.training.data.corpus import read_documents

UNDECIDED = -1


@dataclass(frozen=True, kw_only=True)
class GreedyEvaluation:
    """Results at temperature 0 at every position of a text.

    `agreement` is the share of positions whose certified token is the argmax of log π_mix. It must be 1. `exit_counts`
    are the numbers of positions decided at each exit, and `early_share` is the share of positions decided before the
    last exit. `mean_depth` is the mean l_k / L.
    """

    num_tokens: int
    agreement: float
    early_share: float
    exit_counts: list[int]
    mean_depth: float


def evaluate_greedy(
    model: Nvium, tokenizer: PreTrainedTokenizerBase, documents: Sequence[str], show_progress: bool = False
) -> GreedyEvaluation:
    """Evaluate every token once. It sees at least half a context, or everything before it in the document."""
    num_agreeing, exit_counts_E = 0, torch.zeros(model.config.num_exits, dtype=torch.long)
    context, progress = model.config.max_position_embeddings, "deciding" if show_progress else None
    for _, token_ids, first_target in text_windows(tokenizer, documents, context, progress):
        certified_T, exit_T, explicit_T = decide(model, token_ids[:-1], first_target - 1)
        num_agreeing += int((certified_T == explicit_T).sum())
        exit_counts_E += exit_T.bincount(minlength=len(exit_counts_E)).cpu()
    return as_shares(num_agreeing, exit_counts_E, model.config.exit_layers or [])


def as_shares(num_agreeing: int, exit_counts_E: Tensor, exit_layers: Sequence[int]) -> GreedyEvaluation:
    num_tokens = int(exit_counts_E.sum())
    depths_E = torch.tensor(exit_layers, dtype=torch.float64) / exit_layers[-1]
    return GreedyEvaluation(
        num_tokens=num_tokens,
        agreement=num_agreeing / num_tokens,
        early_share=1 - int(exit_counts_E[-1]) / num_tokens,
        exit_counts=exit_counts_E.tolist(),
        mean_depth=float((exit_counts_E * depths_E).sum()) / num_tokens,
    )


@torch.inference_mode()
def decide(model: Nvium, token_ids: Sequence[int], first: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the certified token, its exit (from 0) and the argmax of log π_mix for positions from `first` on, [T]."""
    out = model(torch.tensor([token_ids], device=model.device), output_exit_logits=True)
    exit_prob_TE, exit_logits_TEV = out.exit_probs[0, first:].double(), out.exit_logits[0, first:]
    explicit_T = mixture.log_mixture(exit_prob_TE.log(), exit_logits_TEV).argmax(-1)
    return *first_certain(exit_prob_TE, exit_logits_TEV), explicit_T


def first_certain(exit_prob_TE: Tensor, exit_logits_TEV: Tensor) -> tuple[Tensor, Tensor]:
    """Return the certified token, and the first exit (from 0) that certifies it, each [T]."""
    remaining_TE = exit_prob_TE.sum(-1, keepdim=True) - exit_prob_TE.cumsum(-1)
    partial_mixture_TV = torch.zeros_like(exit_logits_TEV[:, 0], dtype=torch.float64)
    token_T = exit_T = torch.full_like(exit_prob_TE[:, 0], UNDECIDED, dtype=torch.long)
    for exit_, logits_TV in enumerate(exit_logits_TEV.unbind(1)):
        partial_mixture_TV += exit_prob_TE[:, exit_, None] * logits_TV.double().softmax(-1)
        candidate_T, certain_T = certified_argmax(partial_mixture_TV, remaining_TE[:, exit_])
        is_last = exit_ == exit_logits_TEV.shape[1] - 1
        decided_T = (exit_T == UNDECIDED) & (certain_T | is_last)
        token_T = torch.where(decided_T, candidate_T, token_T)
        exit_T = torch.where(decided_T, exit_, exit_T)
    return token_T, exit_T


def main(arguments: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(prog="python -m research.greedy", description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", help="folder or Hub name [the bundled model]")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(arguments)
    loaded = load_model(args.model, "cpu")
    decided = asdict(evaluate_greedy(loaded.model, loaded.tokenizer, read_documents(args.data), show_progress=True))
    figures = description(loaded) | {f"greedy_{name}": value for name, value in decided.items()}
    print(
        f"{figures['greedy_early_share']:.1%} of tokens are certain before the last exit, at a mean depth of "
        f"{figures['greedy_mean_depth']:.3f}; {figures['greedy_agreement']:.1%} are the argmax of the mixture"
    )
    if args.json:
        write_json(figures, args.json)


if __name__ == "__main__":
    main()
