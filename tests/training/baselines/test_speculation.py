"""Self-speculative decoding loses nothing: what comes out is what the last exit alone would have said."""

import random
from collections import Counter
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from nvium_core.training.baselines import univium
from nvium_core.training.baselines.speculation import accepted, agreed, generate
from tests.training.baselines.small_models import foreseeing, small_univium

MODEL = foreseeing(small_univium(num_layers=5), from_layer=2)


@settings(max_examples=20)
@given(
    prompt_ids=st.lists(st.integers(0, 16), min_size=1, max_size=8),
    max_tokens=st.integers(1, 20),
    exit_layer=st.integers(1, 4),
    draft_length=st.integers(1, 9),
)
def test_greedy_tokens_are_the_dense_models(
    prompt_ids: list[int], max_tokens: int, exit_layer: int, draft_length: int
) -> None:
    generated = generate(MODEL, prompt_ids, max_tokens, exit_layer=exit_layer, draft_length=draft_length)
    assert generated.token_ids == univium.generate(MODEL, prompt_ids, max_tokens).token_ids
    assert len(generated.exit_layers) == max_tokens and {*generated.exit_layers} <= {exit_layer, 5}


@pytest.mark.parametrize("exit_layer", [1, 2, 4])
def test_drafts_are_both_right_and_wrong_in_these_tests(exit_layer: int) -> None:
    kinds = Counter[int]()
    for seed in range(3):
        model = foreseeing(small_univium(num_layers=5, seed=seed), from_layer=2)
        kinds.update(generate(model, [1], 40, exit_layer=exit_layer, draft_length=4).exit_layers)
    assert kinds[exit_layer] >= 10
    assert kinds[5] > 24  # more than the one in five when every draft stands


def test_agreed_tokens_end_with_the_last_exits_own() -> None:
    assert agreed([1, 2, 3], [1, 2, 3, 4]) == [1, 2, 3, 4]
    assert agreed([1, 2, 3], [1, 5, 3, 4]) == [1, 5]
    assert agreed([1, 2, 3], [5, 2, 3, 4]) == [5]
    assert agreed([], [7]) == [7]


def distributions(rows: int) -> st.SearchStrategy[torch.Tensor]:
    weights = st.lists(st.integers(0, 20), min_size=3, max_size=3).filter(any)
    return st.lists(weights, min_size=rows, max_size=rows).map(
        lambda rows: torch.tensor(rows, dtype=torch.float64) / torch.tensor(rows).sum(-1, keepdim=True)
    )


class Grid(random.Random):
    """In place of chance: the numbers given, then zeros."""

    def __init__(self, *numbers: float) -> None:
        super().__init__(0)
        self.numbers = list(numbers)

    def random(self) -> float:
        return self.numbers.pop(0) if self.numbers else 0.0


@given(draft_probs=distributions(1), probs=distributions(2))
def test_one_verified_token_follows_the_last_exits_distribution(draft_probs: torch.Tensor, probs: torch.Tensor) -> None:
    """Enumerated: every draft, every outcome of the test, every replacement, each with its probability."""
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


def test_a_draft_that_only_rounding_rejects_gives_way_to_a_draw_from_the_last_exit() -> None:
    q_V = torch.tensor([0.0, 1.0, 0.0])
    p_V = q_V * (1 - 1e-6)
    assert accepted([1], [q_V], [p_V, p_V], Grid(1 - 1e-9, 0.5)) == [1]


@torch.no_grad()
def test_drawn_tokens_follow_the_last_exits_distribution() -> None:
    """Triples of tokens, two of them drafted at first, against their exact probabilities."""
    model = foreseeing(small_univium(num_layers=2, vocab_size=3, seed=4), from_layer=1)
    model.lm_head.weight *= 0.4  # so that all triples are to be expected
    rng, num_draws = random.Random(0), 400
    counts = Counter(
        tuple(generate(model, [1], 3, exit_layer=1, draft_length=2, rng=rng).token_ids) for _ in range(num_draws)
    )
    expected = {triple: num_draws * probability(model, [1, *triple]) for triple in product(range(3), repeat=3)}
    likely = [triple for triple, count in expected.items() if count >= 5]
    rest = num_draws - sum(expected[triple] for triple in likely)
    observed = [*(counts[triple] for triple in likely), num_draws - sum(counts[triple] for triple in likely)]
    assert len(likely) >= 15
    assert chisquare(observed, [*(expected[triple] for triple in likely), rest]).pvalue > 0.001


def probability(model: torch.nn.Module, token_ids: list[int]) -> float:
    """Of all tokens but the first."""
    log_probs_TV = model(torch.tensor([token_ids])).logits[0, :-1]
    return float(log_probs_TV.gather(-1, torch.tensor(token_ids[1:])[:, None]).sum().exp())


def test_exits_that_are_not_early_are_refused() -> None:
    for exit_layer, draft_length in ((0, 3), (5, 3), (2, 0)):
        with pytest.raises(ValueError, match="cannot draft"):
            generate(MODEL, [1], 4, exit_layer=exit_layer, draft_length=draft_length)
