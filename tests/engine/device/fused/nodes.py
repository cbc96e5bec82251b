"""The nodes of CUDA graphs, found on the meta device: Triton's launches and PyTorch's operators."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import KernelInterface

from nvium_core.choices import CachePrecision
from nvium_core.engine.device.fused.layers import FusedLayers
from nvium_core.engine.device.inputs import Inputs, Variant
from nvium_core.engine.device.paged_cache import PagedCache
from nvium_core.model.config import NviumConfig
from nvium_core.model.nvium import Nvium

NOTHING = ("view", "split", "unbind", "select", "slice", "expand", "aten.t.", "aten.mT.", "transpose", "squeeze")
NOTHING += ("alias", "detach", "permute", "as_strided", "empty", "lift", "flatten", "promote_types")
"""Parts of the names of operators that launch nothing."""

Launch = tuple[Any, tuple[Any, ...], dict[str, Any]]
"""A kernel, its arguments and its constants."""


class Nodes(TorchDispatchMode):
    """Collects operators and launches inside the context."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[str] = []
        self.launches: list[Launch] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not any(view in str(func) for view in NOTHING):
            self.operators.append(str(func))
        return func(*args, **(kwargs or {}))

    @contextmanager
    def collected(self) -> Iterator[None]:
        def noted(kernel: Any, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *arguments, **constants: self.launches.append((kernel, arguments, constants))

        with mock.patch.object(KernelInterface, "__getitem__", noted), torch.inference_mode(), self:
            yield

    def __len__(self) -> int:
        return len(self.operators) + len(self.launches)


def nodes_of_layers(config: NviumConfig, blocks: range, num_rows: int, choice: CachePrecision = "auto") -> Nodes:
    model = Nvium.empty(config).to(torch.bfloat16).eval()
    cache = PagedCache(config, num_pages=64, page_size=256, like=model.lm_head.weight, choice=choice)
    layers, inputs, nodes = FusedLayers(model, cache), Inputs(cache, config), Nodes()
    variant = Variant(num_rows, num_pages=4)
    words, previous_R = (torch.zeros(size, dtype=torch.long, device="meta") for size in (inputs.num_words(variant), 1))
    with nodes.collected():
        layers.run(blocks, inputs.views(words, variant), previous_R)
    return nodes
