from dataclasses import astuple
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nvium_core.errors import DataError
from nvium_core.model.llama import causal_attention
from nvium_core.model.plan import LayerCall
from nvium_core.training.data.texts import Example
from nvium_core.training.data.windows import (
    Batch,
    PackedConversations,
    PackedStream,
    flex_attention_by,
    packed,
    packed_batch,
)
from tests.random_models import random_model
from tests.training.test_objective import outcome_of

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
    stream = PackedStream(np.arange(1, num_tokens + 1, dtype=np.uint16), END, context, seed)
    per_epoch = (num_tokens - 1) // context
    batch = stream.batch(epoch * per_epoch, per_epoch)
    firsts = sorted(batch.inputs[:, 0].tolist())
    assert firsts == list(range(firsts[0], firsts[0] + per_epoch * context, context))
    assert batch.targets.max() <= num_tokens
    assert torch.equal(batch.targets, batch.inputs + 1)


CONTEXT = 16
LENGTHS = st.lists(st.integers(2, CONTEXT + 1), min_size=1, max_size=30)


def examples_of(lengths: list[int]) -> list[Example]:
    """Build examples whose tokens count up from 100, 200, …; the second half is the answer."""
    rows = [np.arange(length) for length in lengths]
    return [Example(100 * number + each, each >= len(each) // 2) for number, each in enumerate(rows, start=1)]


def an_epoch(stream: PackedConversations, epoch: int = 0) -> Batch:
    return stream.batch(epoch * stream.num_windows, stream.num_windows)


@settings(max_examples=60)
@given(lengths=LENGTHS, epoch=st.integers(0, 3), seed=st.integers(0, 3))
def test_an_epoch_contains_every_conversation_once_and_complete(lengths, epoch, seed):
    examples = examples_of(lengths)
    batch = an_epoch(PackedConversations(examples, END, CONTEXT, seed), epoch)
    found = []
    for window in zip(*astuple(batch), strict=True):
        inputs, targets, positions, documents, counted = (row.numpy() for row in window)
        for document in range(documents.max() + 1):
            rows = documents == document
            if (inputs[rows] == END).all():
                assert not counted[rows].any()
                continue
            assert positions[rows].tolist() == list(range(rows.sum()))
            found.append((*inputs[rows], targets[rows][-1]))
            assert targets[rows][:-1].tolist() == inputs[rows][1:].tolist()
            [source] = [each for each in examples if each.tokens[0] == inputs[rows][0]]
            assert counted[rows].tolist() == source.is_answer[1:].tolist()
    assert sorted(found) == sorted(tuple(each.tokens) for each in examples)


@settings(max_examples=60)
@given(num_rows=st.lists(st.integers(1, 100), min_size=1, max_size=60), context=st.just(100))
def test_packing_is_close_to_the_fewest_windows(num_rows, context):
    windows = packed(num_rows, context)
    assert all(sum(num_rows[number] for number in window) <= context for window in windows)
    assert len(windows) <= 1.7 * -(-sum(num_rows) // context) + 1


STREAMS = {
    "conversations": partial(PackedConversations, examples_of([5, 9, 12, 16, 3, 8, 17, 10, 11] * 4), END, CONTEXT),
    "text": partial(PackedStream, np.random.default_rng(0).integers(0, 50, 500, dtype=np.uint16), END, CONTEXT),
}


@pytest.mark.parametrize("kind", STREAMS)
def test_a_batch_depends_on_stream_seed_and_number_only(kind):
    one, other, different = (STREAMS[kind](seed=seed) for seed in (1, 1, 2))
    one.batch(0, 7)
    ours, theirs = one.batch(40, 4), other.batch(40, 4)
    assert all(torch.equal(x, y) for x, y in zip(astuple(ours), astuple(theirs), strict=True))
    assert not torch.equal(different.batch(40, 4).inputs, ours.inputs)


def test_packing_does_not_change_the_loss_of_the_answers():
    model = random_model([1, 2], vocab_size=17)
    rng = np.random.default_rng(0)
    examples = [Example(rng.integers(1, 17, n), np.arange(n) >= n // 2) for n in (6, 9, 3, 15)]
    batch = an_epoch(PackedConversations(examples, END, CONTEXT))
    alone = []
    with torch.no_grad():
        found = outcome_of(model, batch).metrics["mix_loss"]
        for each in examples:
            ids = torch.from_numpy(each.tokens)[None]
            logits = model(ids).logits[0, :-1][torch.from_numpy(each.is_answer[1:])]
            alone += (-logits.gather(-1, ids[0, 1:][torch.from_numpy(each.is_answer[1:])][:, None])).flatten().tolist()
    assert len(examples) > len(batch.inputs)
    assert float(found) == pytest.approx(np.mean(alone))


def test_a_conversation_longer_than_the_context_is_refused():
    with pytest.raises(DataError, match="18 tokens is too long for a context of 16"):
        PackedConversations(examples_of([18]), END, CONTEXT)
