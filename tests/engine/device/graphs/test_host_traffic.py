"""What passes between host and device: one copy each way per Step, and nothing in between.

The meta device has no data, so whatever needs a value there raises, as whatever waits for a GPU's would not.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from nvium_core import Engine, EngineConfig, SamplingParams, TokenEvent
from nvium_core.choices import Schedule
from nvium_core.engine.device.attention import RowAttention, gathered, in_place, page_by_page
from nvium_core.engine.device.graphs import GraphsBackend
from nvium_core.engine.device.graphs.inputs import MAX_ROWS, PaddedSizes, num_fields
from nvium_core.engine.device.paged_cache import PagedCache
from nvium_core.engine.events import Event
from nvium_core.engine.schedule.step import Run, Step
from tests.engine.cached_blocks import sequences_of
from tests.engine.device.graphs.engines import Cached, backend_of, graphs_engine
from tests.random_models import random_model

HOST_TENSORS = {torch.tensor, torch.as_tensor, torch.from_numpy}
READS = {
    getattr(Tensor, name)
    for name in ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__")
}


class Traffic(TorchFunctionMode):
    """Counts what would cross between host and device if all tensors but the named ones were on a device."""

    def __init__(self, there: list[Tensor], back: list[Tensor]) -> None:
        super().__init__()
        self.counts = Counter[str]()
        self._there = {tensor.untyped_storage().data_ptr() for tensor in there}
        self._back = {tensor.untyped_storage().data_ptr() for tensor in back}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in HOST_TENSORS or (func is Tensor.to and isinstance(args[-1], torch.device)):
            self.counts["made on the host"] += 1
        elif self._needs_values(func, args):
            self.counts["read"] += 1
        elif func is Tensor.copy_:
            self.counts["sent"] += args[1].untyped_storage().data_ptr() in self._there
            self.counts["brought back"] += args[0].untyped_storage().data_ptr() in self._back
        return func(*args, **(kwargs or {}))

    def _needs_values(self, func: Callable[..., Any], args: tuple[Any, ...]) -> bool:
        """Asked of what has not been brought back, or to find out how many a mask selects."""
        if func is Tensor.__getitem__:
            return any(is_mask(part) for part in as_tuple(args[1]))
        return func in READS and args[0].untyped_storage().data_ptr() not in self._back


def as_tuple(index: object) -> tuple[object, ...]:
    return index if isinstance(index, tuple) else (index,)


def is_mask(part: object) -> bool:
    return isinstance(part, Tensor) and part.dtype == torch.bool


def traffic_of_step(engine: Engine) -> tuple[Counter[str], list[Event]]:
    backend = backend_of(engine)
    with Traffic([backend.inputs.host], [backend.told]) as traffic:
        events = engine.step()
    return +traffic.counts, events


def prefilled_engine(num_sequences: int, *, is_at_once: bool, schedule: Schedule = "sweep", **wishes: Any) -> Engine:
    config = EngineConfig(max_sequences=num_sequences, schedule=schedule)
    engine = graphs_engine(random_model([1, 2, 4]), config, is_at_once=is_at_once)
    for number in range(num_sequences):
        engine.add(str(number), [1, 2, 3], SamplingParams(max_tokens=30, seed=number, ignore_eos=True, **wishes))
    engine.step()
    return engine


@pytest.mark.parametrize("num_sequences", [1, 3, 8])
@pytest.mark.parametrize("wishes", [{}, {"top_k": 3, "top_p": 0.9, "min_p": 0.1, "temperature": 0.7}])
def test_a_step_sends_once_and_brings_back_once(num_sequences: int, wishes: dict[str, Any]) -> None:
    engine = prefilled_engine(num_sequences, is_at_once=True, **wishes)
    for _ in range(25):
        counts, _ = traffic_of_step(engine)
        assert counts == {"sent": 1, "brought back": 1}


@pytest.mark.parametrize("wishes", [{}, {"top_k": 3, "temperature": 0.7}])
def test_a_pass_sends_once_and_brings_back_once(wishes: dict[str, Any]) -> None:
    engine = prefilled_engine(5, is_at_once=True, schedule="synchronous", **wishes)
    backend = backend_of(engine)
    for turn in range(10):
        with Traffic([backend.inputs.host], [*backend.passes.told]) as traffic:
            assert len(engine.step()) == 5
        is_first = turn == 1  # launches its own pass and the one behind it
        assert +traffic.counts == {"sent": 1 + is_first, "brought back": 1 + is_first}
    assert backend.passes.num_ahead == 8


def test_a_heavy_head_is_read_only_where_somebody_speaks_at_the_cost_of_a_second_copy() -> None:
    engine = prefilled_engine(1, is_at_once=False)
    copies_by_exit: dict[int | None, set[int]] = defaultdict(set)
    while engine.has_work:
        counts, events = traffic_of_step(engine)
        exits = [event.exit for event in events if isinstance(event, TokenEvent)]
        copies_by_exit[exits[0] if exits else None].add(counts.pop("brought back"))
        assert counts == {"sent": 1}
    assert copies_by_exit == {None: {1}, 1: {2}, 2: {2}, 3: {1}}


def test_a_prompt_is_sent_through_the_layers_in_two_copies() -> None:
    """What its rows are, and what they see."""
    model = random_model([1, 2, 4])
    cached, (sequence,) = Cached(model, has_graphs=False), sequences_of([40], model.config.vocab_size)
    for block in range(3):
        with Traffic([], []) as traffic:
            cached.backend.run(Step(block, [Run(sequence, range(40), reaches_front=False)]))
        assert +traffic.counts == {"made on the host": 2}


def test_the_count_sees_what_goes_the_other_way() -> None:
    engine = prefilled_engine(2, is_at_once=True, logit_bias={3: 1.0})
    counts, _ = traffic_of_step(engine)
    assert counts["made on the host"] > 0
    assert counts["read"] > 0


class Crossing(TorchDispatchMode):
    """Refuses operators that see tensors of several devices."""

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        seen = torch.utils._pytree.tree_leaves((args, kwargs, out))
        devices = {leaf.device for leaf in seen if isinstance(leaf, Tensor)}
        assert len(devices) < 2, f"{func} is of {devices}"
        return out


@pytest.mark.parametrize("num_candidates", [0, 4])
@pytest.mark.parametrize("attention", [gathered, page_by_page, in_place])
@torch.inference_mode()
def test_nothing_of_a_graph_needs_to_know_a_value_or_the_host(attention: RowAttention, num_candidates: int) -> None:
    model = random_model([1, 2, 4], dtype=torch.bfloat16).to("meta")
    like = model.lm_head.weight
    cache = PagedCache(model.config, num_pages=4, page_size=256, like=like)
    backend = GraphsBackend(model, cache, attention=attention, num_candidates=num_candidates)
    with Crossing(), Traffic([], []) as traffic:
        for block in range(3):
            backend.replay_block(block, PaddedSizes(num_rows=4, num_pages=1, num_fronts=2))
            backend.replay_route(block, 2)
            for is_ranked in (False, True):
                backend.replay_draw(block, 2, is_ranked=is_ranked)
        for is_ranked in (False, True):
            backend.passes.replay_pass(PaddedSizes(num_rows=4, num_pages=1, num_fronts=4), is_ranked=is_ranked)
    assert not +traffic.counts
    assert backend.inputs.device.numel() == MAX_ROWS * (num_fields(3) + 1) + 2
