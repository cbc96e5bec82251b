"""Passes beside what does not fit into their graph: prompts, and contexts that are too long."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from nvium_core import EngineConfig, SamplingParams
from nvium_core.engine.device.attention import page_by_page
from nvium_core.engine.device.graphs import GraphsBackend
from nvium_core.engine.device.paged_cache import PagedCache
from nvium_core.engine.schedule.scheduler import pass_of
from nvium_core.engine.schedule.sequence import Sequence
from nvium_core.engine.schedule.step import Run
from tests.engine.device.graphs.engines import backend_of, graphs_engine
from tests.engine.device.graphs.test_exactness import Noting
from tests.engine.device.graphs.test_meta_device import ToHost
from tests.engine.driving import alone, drained
from tests.random_models import random_model

CHUNK = 20


def test_decoding_rows_keep_their_graph_and_are_launched_ahead_while_a_prompt_is_read() -> None:
    model = random_model([1, 2, 4], context=128)
    config = EngineConfig(schedule="synchronous", max_sequences=4, chunk_rows=CHUNK, page_size=64)
    engine = graphs_engine(model, config)
    backend = backend_of(engine)
    replay = backend.replay = backend.passes.replay = Noting(torch.device("cpu"))
    requests = [([1, 2, 3, number], SamplingParams(max_tokens=20, seed=number, ignore_eos=True)) for number in range(3)]
    requests.append(([t % 17 for t in range(5 * CHUNK)], SamplingParams(max_tokens=4, seed=9, ignore_eos=True)))
    for number, (prompt, params) in enumerate(requests[:3]):
        engine.add(str(number), prompt, params)
    told = [event for _ in range(4) for event in engine.step()]
    engine.add("3", *requests[3])
    replay.names.clear()
    num_ahead = backend.passes.num_ahead
    for _ in range(4):
        told += engine.step()
        assert not backend.has_waited
    assert {name[0] for name in replay.names} == {"pass"}  # type: ignore[index]
    assert backend.passes.num_ahead - num_ahead == 4
    assert len(told) == 3 * 8
    rest = drained(engine)
    for number, (prompt, params) in enumerate(requests):
        expected = alone(model, prompt, params)
        tokens = [event.token_id for event in told if event.sequence_id == str(number)]  # type: ignore[union-attr]
        assert tokens + rest[str(number), 0].token_ids == expected.token_ids


def test_a_page_that_begins_does_not_keep_the_next_pass_from_being_launched_ahead() -> None:
    engine = graphs_engine(random_model([1, 2, 4]), EngineConfig(schedule="synchronous", max_sequences=4, page_size=2))
    for number in range(4):
        engine.add(str(number), [1] * (1 + number), SamplingParams(max_tokens=30, seed=number, ignore_eos=True))
    for _ in range(14):
        assert len(engine.step()) == 4
        engine.check_integrity()
    assert backend_of(engine).passes.num_ahead == 11


def test_a_long_context_does_not_widen_the_tables_of_short_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 sequences of 200 tokens beside one of 30,000, page by page: with one table, 65 rows of 118 pages."""
    model = random_model([1, 2], dtype=torch.bfloat16, context=30_000).to("meta")
    cache = PagedCache(model.config, num_pages=200, page_size=256, like=model.lm_head.weight)
    backend, pages, asked = GraphsBackend(model, cache, attention=page_by_page), iter(range(200)), list[int]()

    def note(q_XHP: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        asked.append(len(q_XHP))
        return q_XHP, q_XHP.new_empty(q_XHP.shape[1], len(q_XHP), dtype=torch.float32)

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", note)
    runs = list(decoding([200] * 64 + [30_000], pages))
    with ToHost():
        backend.run(pass_of(runs, 2))
    num_layers = model.config.num_hidden_layers
    assert sum(asked) == num_layers * (64 * 8 + 118)


def decoding(lengths: list[int], pages: Iterator[int]) -> Iterator[Run]:
    for seat, length in enumerate(lengths):
        sequence = Sequence(str(seat), [0] * length, SamplingParams(), seed=0, num_blocks=2, arrival=0)
        sequence.seat, sequence.pages = seat, [next(pages) for _ in range(-(-length // 256))]
        yield Run(sequence, range(length - 1, length), reaches_front=True)
