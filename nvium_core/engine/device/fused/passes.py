"""A pass over few rows in Triton kernels: layers, then decisions. The reference is the pass of graphs/backend.py."""

from torch import Tensor

from nvium_core.engine.device.attention import RowAttention
from nvium_core.engine.device.fused.decisions import FusedDecisions
from nvium_core.engine.device.fused.layers import FusedLayers
from nvium_core.engine.device.inputs import InputViews, Variant
from nvium_core.engine.device.paged_cache import PagedCache
from nvium_core.model.nvium import Nvium


class FusedPass:
    def __init__(self, model: Nvium, cache: PagedCache, attention: RowAttention) -> None:
        self._layers = FusedLayers(model, cache, attention)
        self._decisions = FusedDecisions(model, cache)

    def run(self, blocks: range, inputs: InputViews, previous_R: Tensor, answers_4R: Tensor, variant: Variant) -> None:
        """Run rows through the blocks, and write the answers of their fronts."""
        self._layers.run(blocks, inputs, previous_R)
        self._decisions.decide(blocks, inputs, variant, answers_4R)
