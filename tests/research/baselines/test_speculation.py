import random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from research.baselines import decoding as univium
from research.baselines.speculation import accepted, generate
from tests.research.baselines.small_models import foreseeing, small_univium

MODEL = foreseeing(small_univium(num_layers=5), from_layer=2)


@settings(max_examples=20)
@given(
    prompt_ids=st.lists(st.integers(0, 16), min_size=1, max_size=8),
    max_tokens=st.integers(1, 20),
    exit_layer=st.integers(1, 4),
    draft_length=st.integers(1, 9),
)
def test_greedy_tokens_equal_the_dense_models(prompt_ids, max_tokens, exit_layer, draft_length):
    generated = generate(MODEL, prompt_ids, max_tokens, exit_layer=exit_layer, draft_length=draft_length)
    assert generated.token_ids == univium.generate(MODEL, prompt_ids, max_tokens).token_ids
    assert len(generated.exit_layers) == max_tokens and {*generated.exit_layers} <= {exit_layer, 5}


def distributions(rows: int) -> st.SearchStrategy[torch.Tensor]:
    weights = st.lists(st.integers(0, 20), min_size=3, max_size=3).filter(any)
    return st.lists(weights, min_size=rows, max_size=rows).map(
        lambda rows: torch.tensor(rows, dtype=torch.float64) / torch.tensor(rows).sum(-1, keepdim=True)
    )


class Grid(random.Random):
    """A fake generator: returns the given numbers, then zeros."""

    def __init__(self, *numbers: float) -> None:
        super().__init__(0)
        self.numbers = list(numbers)

    def random(self) -> float:
        return self.numbers.pop(0) if self.numbers else 0.0


@given(draft_probs=distributions(1), probs=distributions(2))
def test_one_verified_token_follows_the_last_exits_distribution(draft_probs, probs):
    """Enumerate every draft, outcome and replacement with its probability."""
    (q_V,), p_V = draft_probs, probs[0]
    total_V = torch.zeros(3, dtype=torch.float64)
    for draft in range(3):
        if not q_V[draft]:
            continue
        stands = min(1.0, float(p_V[draft] / q_V[draft]))
        total_V[draft] += q_V[draft] * stands
        if stands:
            assert accepted([draft], [q_V], list(probs), Grid(stands * (1 - 1e-9)))[0] == draft
        if stands < 1:
            rest_V = (p_V - q_V).clamp(min=0)
            edges_V = rest_V.cumsum(0) / rest_V.sum()
            for token in (token for token in range(3) if rest_V[token] > 1e-9):
                middle = float(edges_V[token] - rest_V[token] / rest_V.sum() / 2)
                assert accepted([draft], [q_V], list(probs), Grid(stands + 1e-9, middle)) == [token]
            total_V += q_V[draft] * (1 - stands) * rest_V / rest_V.sum()
    torch.testing.assert_close(total_V, p_V)
