"""Runs Steps on the best backend for model and device."""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from nvium_core.engine.config import EngineConfig
from nvium_core.engine.device.graphs.backend import GraphsBackend
from nvium_core.engine.device.layers import LayersBackend
from nvium_core.engine.device.memory import CacheSize, check_memory
from nvium_core.engine.device.native.backend import NativeBackend
from nvium_core.engine.device.native.weights import supports
from nvium_core.engine.device.paged_cache import PagedCache
from nvium_core.engine.device.processor import use_threads
from nvium_core.engine.errors import DeviceLost, require
from nvium_core.engine.schedule.step import Backend, Outcome, Step, StepResult
from nvium_core.model.nvium import Nvium
from nvium_core.model.stored import StoredMatrix, materialise

logger = logging.getLogger(__name__)

MakeBackend = Callable[[Nvium, PagedCache, EngineConfig], Backend]


def best_backend(model: Nvium, cache: PagedCache, config: EngineConfig) -> Backend:
    """Choose the backend. Raise `InvalidRequest` if `deterministic` is set but the native kernels cannot run."""
    if supports(model, config.instructions):
        return NativeBackend(model, cache, config)
    message = "requires a CPU, a C++ compiler and a model that the C++ kernels support"
    require(not config.deterministic, "deterministic", message)
    if model.device.type == "cpu":
        stored = (weight for weight in model.parameters() if isinstance(weight, StoredMatrix))
        check_memory(sum(weight.nbytes for weight in stored), cache.num_bytes)
    materialise(model)  # PyTorch's layers read every weight in every pass
    if model.device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)  # PyTorch prefers it on an H100, but it plans anew for every shape
        return GraphsBackend.with_fallback(model, cache)
    return LayersBackend(model, cache, "the C++ kernels do not support the model, or there is no C++ compiler")


class Runner:
    def __init__(self, model: Nvium, config: EngineConfig, size: CacheSize, make_backend: MakeBackend) -> None:
        use_threads(config.threads)
        self.model = model.eval()
        self.config = config
        like, choice = model.lm_head.weight, config.cache_dtype
        self.cache = PagedCache(
            model.config, num_pages=size.num_pages, page_size=size.page_size, like=like, choice=choice
        )
        self._device = model.device
        self._max_rows = config.bounds(model.device.type).step
        with self._on_device():
            self.backend = make_backend(model, self.cache, config)

    def prepare(self) -> None:
        with self._on_device():
            self.backend.prepare(self.config)

    def run(self, step: Step) -> StepResult:
        """Run a Step. If it fails, retry each sequence alone. Raise `DeviceLost` if the device has failed."""
        try:
            with self._on_device():
                return self.backend.run(step, self._max_rows)
        except MemoryError:
            raise  # the process is out of memory, which is not the fault of a sequence
        except Exception as error:
            if is_device_lost(error):
                raise DeviceLost("the device has failed") from error
            if len(step.runs) == 1:
                logger.exception("the forward pass of a sequence failed; the sequence will end")
                return StepResult([Outcome([], error=error)], [])
        logger.warning("a Step of %d sequences failed; retrying each sequence alone", len(step.runs))
        return self._run_alone(step)

    def _run_alone(self, step: Step) -> StepResult:
        results = [self.run(Step(step.blocks, [run], step.policy)) for run in step.runs]
        return StepResult(
            [outcome for result in results for outcome in result.outcomes],
            [report for result in results for report in result.reports],
        )

    @property
    def eager_passes(self) -> dict[str, int]:
        return dict(self.backend.eager_passes)

    @property
    def processor(self) -> str:
        """Native kernels: instruction set and threads, such as "avx2x4". CUDA graphs: "graphs". Otherwise empty."""
        instructions = self.backend.instructions or ""
        has_threads = instructions and self._device.type == "cpu"
        return f"{instructions}x{torch.get_num_threads()}" if has_threads else instructions

    def _on_device(self) -> AbstractContextManager[object]:
        return torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()


def is_device_lost(error: Exception) -> bool:
    """Whether all later calls on the device will fail too. False if the device is only out of memory."""
    message = str(error)
    is_of_libraries = isinstance(error, RuntimeError) and message.startswith(("CUDA error", "cuDNN error"))
    is_of_device = is_of_libraries or isinstance(error, torch.AcceleratorError)
    return is_of_device and "ALLOC_FAILED" not in message and "out of memory" not in message
