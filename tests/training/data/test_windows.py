import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nvium_core.model.llama import causal_attention
from nvium_core.model.plan import LayerCall
from nvium_core.training.data.windows import Batch, PackedStream, flex_attention_by, packed_batch
from tests.random_models import random_model

END = 0
WINDOW = torch.tensor([[3, 4, END, 5, 6, 7, END, END, 8, 9, 10, END, 11]])


def batch_of(window: Tensor) -> Batch:
    return packed_batch(window[:, :-1], window[:, 1:], END)


def test_positions_and_documents_restart_at_each_end_of_text_and_a_row_attends_to_its_own_document():
    batch = batch_of(WINDOW)
    assert batch.positions.tolist() == [[0, 1, 0, 1, 2, 3, 0, 0, 1, 2, 3, 0]]
    assert batch.documents.tolist() == [[0, 0, 1, 1, 1, 1, 2, 3, 3, 3, 3, 4]]
    seen = batch.mask()[0, 0]
    for row, column in np.ndindex(*seen.shape):
        same = batch.documents[0, row] == batch.documents[0, column]
        assert seen[row, column] == (same and column <= row)


def outputs(batch: Batch) -> Tensor:
    model = random_model([1, 2])
    with torch.no_grad():
        states = model.hidden_states(batch.inputs, batch.positions, batch.attention())
        return model.lm_head(model.exit_outputs(states)[1][-1])


@torch.no_grad()
def test_a_packed_document_has_the_logits_it_has_alone():
    alone, found = random_model([1, 2]), outputs(batch_of(WINDOW))
    for rows in (slice(0, 2), slice(2, 6), slice(6, 7), slice(7, 11)):
        expected = alone(WINDOW[:, rows], output_exit_logits=True).exit_logits[..., -1, :]
        torch.testing.assert_close(found[:, rows], expected)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@given(st.lists(st.lists(st.integers(0, 3), min_size=13, max_size=13), min_size=1, max_size=3))
@settings(max_examples=30, deadline=None)
def test_attention_by_document_is_that_of_the_mask(windows):
    batch = batch_of(torch.tensor(windows))
    q_BTHP, k_BTGP, v_BTGP = torch.randn(3, len(windows), 12, 4, 8)
    q_BTHP = torch.cat((q_BTHP, -q_BTHP), dim=2)
    expected = causal_attention(batch.mask())(q_BTHP, k_BTGP, v_BTGP, LayerCall(0, 0))
    for attend in (batch.attention(), flex_attention_by(batch.documents)):
        torch.testing.assert_close(attend(q_BTHP, k_BTGP, v_BTGP, LayerCall(0, 0)), expected)


@settings(max_examples=40, deadline=None)
@given(st.integers(9, 400), st.integers(1, 8), st.integers(0, 3), st.integers(0, 5))
def test_an_epoch_reads_every_window_once(num_tokens, context, epoch, seed):
    stream = PackedStream(np.arange(1, num_tokens + 1, dtype=np.uint16), END, seed)
    per_epoch = (num_tokens - 1) // context
    batch = stream.batch(epoch * per_epoch, per_epoch, context)
    firsts = sorted(batch.inputs[:, 0].tolist())
    assert firsts == list(range(firsts[0], firsts[0] + per_epoch * context, context))
    assert batch.targets.max() <= num_tokens
    assert torch.equal(batch.targets, batch.inputs + 1)
