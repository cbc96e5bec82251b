"""Our engine's logits at every position of a text.

Shapes: C rows of a Step, V vocabulary.
"""

import ctypes
import subprocess
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from nvium_core.choices import CachePrecision
from nvium_core.engine.config import EngineConfig
from nvium_core.engine.device.native.backend import NativeBackend
from nvium_core.engine.device.native.library import COMPILER, FLAGS, FOLDER, PRECISIONS
from nvium_core.engine.device.paged_cache import PagedCache
from nvium_core.engine.engine import Engine
from nvium_core.engine.sampling_params import SamplingParams
from nvium_core.engine.schedule.step import Rows, Step, StepResult
from nvium_core.model.nvium import Nvium

SOURCE = Path(__file__).parent / "logits.cpp"


class LogitsBackend(NativeBackend):
    """Adds the logits [C, V] of every Step's rows to `found`. The model must have one exit."""

    def __init__(self, model: Nvium, cache: PagedCache, config: EngineConfig, found: list[Tensor]) -> None:
        super().__init__(model, cache, config)
        self._found = found
        self._compute = getattr(compiled(self.instructions or ""), f"logits_{PRECISIONS[model.dtype]}")

    def run(self, step: Step, max_rows: int) -> StepResult:
        result = super().run(step, max_rows)
        rows = [Rows(each.sequence, each.rows(0, each.sequence.filled, is_tied=False)) for each in step.runs]
        slots = self._cache.slots(rows)
        logits_CV = torch.empty(len(slots), self._vocab_size)
        pointers = ctypes.c_void_p(slots.ctypes.data), len(slots), ctypes.c_void_p(logits_CV.data_ptr())
        self._compute(ctypes.byref(self._model), *pointers)
        self._found.append(logits_CV)
        return result


@cache
def compiled(instructions: str) -> Any:
    with TemporaryDirectory() as folder:
        made = str(Path(folder) / "logits.so")
        command = [*COMPILER, *FLAGS[instructions], f"-I{FOLDER}", str(SOURCE), "-o", made]
        subprocess.run(command, check=True)  # noqa: S603  a fixed command
        return ctypes.CDLL(made)


def engine_logits(model: Nvium, context: int, cache_dtype: CachePrecision) -> Callable[[list[int]], list[Tensor]]:
    """Return a function that computes the logits of a text of at most `context` tokens, in chunks of rows."""
    found: list[Tensor] = []
    config = EngineConfig(max_sequences=1, context=context + 1, prefix_caching=False, cache_dtype=cache_dtype)
    engine = Engine(model, config, make_backend=partial(LogitsBackend, found=found))

    def logits(token_ids: list[int]) -> list[Tensor]:
        found.clear()
        scored = SamplingParams(max_tokens=1, logprobs=0, prompt_logprobs=True)  # so every row passes the last layer
        engine.generate([token_ids], scored)
        return found

    return logits
