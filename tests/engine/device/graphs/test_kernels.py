"""How many kernels a layer, a router and a draw take, counted on the meta device, so that none is added unnoticed.

A graph saves the launching of kernels and not what each takes beside its arithmetic, a few microseconds.
"""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nvium_core.engine.device.attention import RowAttention, gathered, in_place, page_by_page
from nvium_core.engine.device.graphs import GraphsBackend
from nvium_core.engine.device.graphs.inputs import PaddedSizes
from nvium_core.engine.device.paged_cache import PagedCache
from tests.random_models import random_model

aten = torch.ops.aten
NOTHING = {aten.empty_like.default, aten.promote_types.default, aten.lift_fresh.default}
FOUR = PaddedSizes(num_rows=4, num_pages=1, num_fronts=4)


class Kernels(TorchDispatchMode):
    """Operators that are neither views nor conversions of what needs none."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        is_cast = str(func).startswith("aten.to.") and out.dtype != args[0].dtype
        if is_cast or not (func.is_view or func in NOTHING):
            self.counts[str(func)] += 1
        return out


def backend_of(exit_layers: list[int], attention: RowAttention, num_candidates: int = 4) -> GraphsBackend:
    model = random_model(exit_layers, dtype=torch.bfloat16).to("meta")
    cache = PagedCache(model.config, num_pages=4, page_size=256, like=model.lm_head.weight)
    return GraphsBackend(model, cache, attention=attention, num_candidates=num_candidates)


@torch.inference_mode()
def kernels(function: Callable[[], object]) -> Counter[str]:
    with Kernels() as counted:
        function()
    return counted.counts


@pytest.mark.parametrize(
    ("attention", "most"),
    [(in_place, 18), (page_by_page, 26), (gathered, 20)],
    ids=["in place", "page by page", "gathered"],
)
def test_a_layer_takes_so_many_kernels(attention: RowAttention, most: int) -> None:
    one, two = (kernels(partial(backend_of([layers], attention).replay_block, 0, FOUR)) for layers in (1, 2))
    assert (two - one).total() <= most, two - one


@pytest.mark.parametrize("number", [1, 2, 4])
def test_a_pass_takes_so_many_kernels_a_block_beside_its_layers(number: int) -> None:
    passes = backend_of(list(range(1, number + 1)), in_place).passes
    counts = kernels(partial(passes.replay_pass, FOUR, is_ranked=False))
    assert counts.total() <= 39 + number * (18 + 25), counts


@pytest.mark.parametrize(("is_ranked", "num_candidates", "most"), [(False, 4, 18), (True, 4, 65), (True, 0, 37)])
def test_a_draw_takes_so_many_kernels(is_ranked: bool, num_candidates: int, most: int) -> None:
    """Of the ranked ones, the second has more, but sorts candidates only."""
    backend = backend_of([1, 2], in_place, num_candidates)
    counts = kernels(partial(backend.replay_draw, 0, 4, is_ranked=is_ranked))
    assert counts.total() <= most, counts


def test_a_router_takes_so_many_kernels_and_converts_no_weights() -> None:
    counts = kernels(partial(backend_of([1, 2], in_place).replay_route, 0, 4))
    assert counts.total() <= 13, counts
    assert sum(count for name, count in counts.items() if name.startswith("aten.to.")) <= 1, counts
