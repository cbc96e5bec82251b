"""The nodes of a pass's CUDA graph, found on the meta device: Triton's launches and PyTorch's operators."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nvium_core.engine.device.fused import attention, decisions, layers
from nvium_core.engine.device.graphs.backend import GraphsBackend
from nvium_core.engine.device.inputs import Variant
from nvium_core.engine.device.paged_cache import PagedCache
from nvium_core.model.config import NviumConfig
from nvium_core.model.nvium import Nvium

VIEWS = ("view", "split", "unbind", "select", "slice", "expand", "aten.t.", "transpose", "squeeze", "alias", "detach")
NOTHING = (*VIEWS, "permute", "as_strided", "empty", "lift", "flatten", "promote_types")
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
        def note(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
            self.launches.append((kernel, arguments, constants))

        with ExitStack() as stack:
            for module in (attention, decisions, layers):
                stack.enter_context(mock.patch.object(module, "launch", note))
            stack.enter_context(torch.inference_mode())
            stack.enter_context(self)
            yield

    def __len__(self) -> int:
        return len(self.operators) + len(self.launches)


def meta_backend(config: NviumConfig, **options: Any) -> GraphsBackend:
    model = Nvium.empty(config).to(torch.bfloat16).eval()
    for exit_ in model.exits[:-1]:
        exit_.router.to(torch.float32)
    cache = PagedCache(config, num_pages=64, page_size=256, like=model.lm_head.weight)
    return GraphsBackend(model, cache, **options)


def nodes_of(backend: GraphsBackend, blocks: range, variant: Variant) -> Nodes:
    nodes = Nodes()
    with nodes.collected():
        backend.forward_and_decide(blocks, variant)
    return nodes
