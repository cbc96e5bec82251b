import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nvium_core.model.llama import causal_attention
from nvium_core.training.data.windows import packed_batch
from research.baselines.calm import CalmForCausalLM
from research.baselines.confidence import confident_losses
from tests.research.baselines.small_models import small_calm

MODEL = small_calm()

thresholds = st.sampled_from([0.4, 0.5, 0.6, 0.8])  # at which some leave at every exit
texts = st.permutations(range(1, 17)).map(lambda token_ids: token_ids[:9])


@torch.no_grad()
def by_hand(model: CalmForCausalLM, token_ids: list[int], threshold: float) -> tuple[list[torch.Tensor], list[int]]:
    """Apply the rule row by row without a cache; a row that has exited keeps its state in the layers above."""
    layers, blocks = model.model.layers, model.config.blocks
    inputs_LT: list[list[torch.Tensor]] = [[] for _ in layers]
    logits, exits = [], []
    for position, token in enumerate(token_ids):
        h_D, has_left = model.model.embed_tokens(torch.tensor(token)), False
        rotary = model.model.rotary_emb(torch.arange(position + 1)[None], torch.float64)
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
def test_losses_of_a_known_text_equal_those_row_by_row_without_a_cache(token_ids, threshold):
    window_BT = torch.tensor([token_ids])
    losses = confident_losses(MODEL, packed_batch(window_BT[:, :-1], window_BT[:, 1:], end_token=0), threshold)
    logits, exits = by_hand(MODEL, token_ids[:-1], threshold)
    assert losses.exits[0].tolist() == exits
    expected = torch.stack([-row_V[target] for row_V, target in zip(logits, token_ids[1:], strict=True)])
    torch.testing.assert_close(losses.nll[0], expected)
