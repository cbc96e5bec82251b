"""CALM*'s rule: who leaves where, and what those behind see of it."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nvium_core.model.llama import causal_attention
from nvium_core.training.baselines import univium
from nvium_core.training.baselines.calm import CalmForCausalLM
from nvium_core.training.baselines.confidence import confident_losses, generate, leave_when_confident
from nvium_core.training.baselines.decoding import Decoding
from nvium_core.training.data.windows import packed_batch
from tests.training.baselines.small_models import small_batch, small_calm

MODEL = small_calm()
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7]

thresholds = st.sampled_from([0.4, 0.5, 0.6, 0.8])  # at which some leave at every exit
texts = st.permutations(range(1, 17)).map(lambda token_ids: token_ids[:9])


@torch.no_grad()
def by_hand(model: CalmForCausalLM, token_ids: list[int], threshold: float) -> tuple[list[torch.Tensor], list[int]]:
    """Row by row without a cache: every layer's inputs are kept, and a row that has left has the same in all others."""
    layers, blocks = model.model.layers, model.config.blocks
    inputs_LT: list[list[torch.Tensor]] = [[] for _ in layers]
    logits, exits = [], []
    for position, token in enumerate(token_ids):
        h_D, has_left = model.model.embed_tokens(torch.tensor(token)), False
        rotary = model.model.rotary(torch.arange(position + 1)[None], torch.float64)
        for number, block in enumerate(blocks):
            for layer in block:
                inputs_LT[layer].append(h_D)
                if not has_left:
                    h_D = layers[layer](torch.stack(inputs_LT[layer])[None], rotary, causal_attention())[0, -1]
            probs_V = model.lm_head(model.exits[number].norm(h_D)).softmax(-1)
            if not has_left and (probs_V.max() > threshold or number == len(blocks) - 1):
                has_left = True
                logits.append(probs_V.log())
                exits.append(number)
    return logits, exits


@settings(max_examples=8)
@given(token_ids=texts, threshold=thresholds)
def test_a_known_text_is_judged_as_row_by_row_without_a_cache(token_ids: list[int], threshold: float) -> None:
    window_BT = torch.tensor([token_ids])
    losses = confident_losses(MODEL, packed_batch(window_BT[:, :-1], window_BT[:, 1:], end_token=0), threshold)
    logits, exits = by_hand(MODEL, token_ids[:-1], threshold)
    assert losses.exits[0].tolist() == exits
    expected = torch.stack([-row_V[target] for row_V, target in zip(logits, token_ids[1:], strict=True)])
    torch.testing.assert_close(losses.nll[0], expected)


@settings(max_examples=8)
@given(token_ids=texts, threshold=thresholds)
@torch.no_grad()
def test_decoding_a_known_text_row_by_row_says_the_same(token_ids: list[int], threshold: float) -> None:
    decoding = Decoding(MODEL, token_ids[:1], len(token_ids))
    logits, exits = by_hand(MODEL, token_ids, threshold)
    for position, token in enumerate(token_ids[1:]):
        logits_V, exit_layer = leave_when_confident(decoding, threshold)
        torch.testing.assert_close(logits_V.log_softmax(-1), logits[position])
        assert exit_layer == MODEL.config.exit_layers[exits[position]]
        decoding.token_ids.append(token)


def test_documents_of_a_batch_are_judged_alone() -> None:
    packed = confident_losses(MODEL, small_batch(num_windows=2), 0.5)
    second = small_batch(num_windows=2)
    rows = slice(10, 20)  # the second documents
    alone = packed_batch(second.inputs[:, rows], second.targets[:, rows], end_token=0)
    found = confident_losses(MODEL, alone, 0.5)
    assert torch.equal(found.exits, packed.exits[:, rows])
    torch.testing.assert_close(found.nll, packed.nll[:, rows])


def test_no_confidence_is_the_dense_model() -> None:
    generated = generate(MODEL, [1, 2], 20, threshold=1.0)
    assert generated.token_ids == univium.generate(MODEL, [1, 2], 20).token_ids
    assert generated.exit_layers == [6] * 20


def test_any_confidence_is_the_first_exit_alone() -> None:
    generated = generate(MODEL, [1], 20, threshold=0.0)
    assert generated.exit_layers == [2] * 20
    with torch.no_grad():
        known = torch.tensor([[1, *generated.token_ids[:-1]]])
        first_exit_TV = MODEL(known, output_exit_logits=True).exit_logits[0, :, 0]
    assert generated.token_ids == first_exit_TV.argmax(-1).tolist()


def test_the_prompt_passes_every_layer_and_tokens_leave_at_all_exits() -> None:
    generated = generate(MODEL, TOKENS, 40, threshold=0.5)
    assert {*generated.exit_layers} == {2, 4, 6}
    with torch.no_grad():
        exit_logits_EV = MODEL(torch.tensor([TOKENS]), output_exit_logits=True).exit_logits[0, -1]
    number = MODEL.config.exit_layers.index(generated.exit_layers[0])
    assert generated.token_ids[0] == int(exit_logits_EV[number].argmax())


@pytest.mark.parametrize("threshold", [0.0, 0.5])
def test_drawn_tokens_repeat_with_the_generators_seed(threshold: float) -> None:
    first, second, other = (
        generate(MODEL, [1], 30, threshold=threshold, rng=random.Random(seed)).token_ids for seed in (1, 1, 2)
    )
    assert first == second != other
