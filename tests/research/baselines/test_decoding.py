import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nvium_core import NviumForCausalLM
from nvium_core.model.llama import causal_attention
from research.baselines.decoding import Decoding, generate
from tests.research.baselines.small_models import small_univium

MODEL = small_univium()


@torch.no_grad()
def greedy(model: NviumForCausalLM, prompt_ids: list[int], max_tokens: int) -> list[int]:
    token_ids = list(prompt_ids)
    for _ in range(max_tokens):
        token_ids.append(int(model(torch.tensor([token_ids])).logits[0, -1].argmax()))
    return token_ids[len(prompt_ids) :]


@settings(max_examples=15)
@given(prompt_ids=st.lists(st.integers(0, 16), min_size=1, max_size=8), max_tokens=st.integers(1, 12))
def test_greedy_tokens_equal_those_of_full_forward_passes(prompt_ids, max_tokens):
    generated = generate(MODEL, prompt_ids, max_tokens)
    assert generated.token_ids == greedy(MODEL, prompt_ids, max_tokens)
    assert generated.exit_layers == [4] * max_tokens


@settings(max_examples=15)
@given(
    cuts=st.sets(st.integers(1, 9)),
    token_ids=st.lists(st.integers(0, 16), min_size=10, max_size=10),
    split=st.booleans(),
)
@torch.no_grad()
def test_rows_can_be_run_in_any_portions(cuts, token_ids, split):
    decoding, states = Decoding(MODEL, token_ids, 1), []
    for first, stop in zip([0, *sorted(cuts)], [*sorted(cuts), 10], strict=True):
        h_RD = decoding.embed(token_ids[first:stop])
        for layers in (range(2), range(2, 4)) if split else (range(4),):
            h_RD = decoding.run(h_RD, layers, first)
        states.append(h_RD)
    positions_BT = torch.arange(10)[None]
    (expected_BTD,) = MODEL.hidden_states(torch.tensor([token_ids]), positions_BT, causal_attention())
    torch.testing.assert_close(torch.cat(states), expected_BTD[0])
