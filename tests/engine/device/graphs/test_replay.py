"""Capture and replay with a fake CUDA; a failed capture affects no other graph."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from nvium_core.engine.device.graphs.capture import Replay

CUDA = torch.device("cuda:1")
POOL = (0, 1)


class Cuda:
    """A fake `torch.cuda`. A failed capture raises at its end and leaves the allocator in capture mode."""

    def __init__(self) -> None:
        self.stream_now = "default"
        self.fails_to_end = False
        self.num_captures = self.num_streams = 0
        self.is_capturing = self.allocator_captures = False

    def CUDAGraph(self) -> "Graph":  # noqa: N802 (PyTorch's name)
        return Graph(self)

    def graph_pool_handle(self) -> tuple[int, int]:
        return POOL

    def current_device(self) -> int:
        return 1

    def synchronize(self, device: torch.device) -> None:
        assert not self.is_capturing

    def current_stream(self, device: torch.device) -> SimpleNamespace:
        assert device == CUDA
        return SimpleNamespace(name=self.stream_now, wait_stream=lambda _: None)

    def Stream(self, device: torch.device) -> SimpleNamespace:  # noqa: N802 (PyTorch's name)
        assert device == CUDA
        self.num_streams += 1
        return SimpleNamespace(name="aside", wait_stream=lambda _: None)

    @contextmanager
    def stream(self, stream: SimpleNamespace) -> Iterator[None]:
        before, self.stream_now = self.stream_now, stream.name
        try:
            yield
        finally:
            self.stream_now = before

    def end_allocation(self, device: int, pool: tuple[int, int]) -> None:
        assert (device, pool) == (1, POOL)
        if not self.allocator_captures:
            raise RuntimeError("not currently recording to the pool")
        self.allocator_captures = False


class Graph:
    def __init__(self, cuda: Cuda) -> None:
        self.cuda, self.num_replays = cuda, 0

    def capture_begin(self, pool: tuple[int, int], *, capture_error_mode: str) -> None:
        assert (pool, capture_error_mode, self.cuda.stream_now) == (POOL, "thread_local", "aside")
        assert not self.cuda.is_capturing
        assert not self.cuda.allocator_captures
        self.cuda.is_capturing = self.cuda.allocator_captures = True
        self.cuda.num_captures += 1

    def capture_end(self) -> None:
        was_capturing, self.cuda.is_capturing = self.cuda.is_capturing, False
        if self.cuda.fails_to_end or not was_capturing:
            raise RuntimeError("the capture was invalidated")
        self.cuda.allocator_captures = False

    def replay(self) -> None:
        self.num_replays += 1


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    cuda = Cuda()
    monkeypatch.setattr(torch, "cuda", cuda)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", cuda.end_allocation, raising=False)
    return cuda


def test_a_function_is_captured_once_and_all_captures_use_one_stream(cuda):
    replay, calls = Replay(CUDA), list[str]()
    for _ in range(3):
        replay.run("one", lambda: calls.append(cuda.stream_now))
    (graph,) = replay.graphs.values()
    assert isinstance(graph, Graph)
    assert (cuda.num_captures, graph.num_replays) == (1, 3)
    assert calls == ["aside"] * 2
    replay.run("another", lambda: None)
    assert (cuda.num_captures, cuda.num_streams) == (2, 1)


@pytest.mark.parametrize("fails", ["in the warm-up", "in the capture", "at the end"])
def test_a_failed_capture_is_logged_with_its_cause_and_affects_no_other(cuda, fails, caplog):
    replay, calls = Replay(CUDA), list[str]()

    def function() -> None:
        calls.append(cuda.stream_now)
        if fails == ("in the capture" if cuda.is_capturing else "in the warm-up") and cuda.stream_now == "aside":
            raise torch.OutOfMemoryError("no memory for sizes")

    replay.run("before", lambda: None)
    cuda.fails_to_end = fails == "at the end"
    replay.run("one", function)
    cuda.fails_to_end = False
    cause = "the capture was invalidated" if fails == "at the end" else "no memory for sizes"
    assert f"cannot capture the CUDA graph one: {cause}" in caplog.text
    assert (cuda.stream_now, calls[-1]) == ("default", "default")
    assert (cuda.is_capturing, cuda.allocator_captures) == (False, False)
    calls.clear()
    for name in ("before", "one", "another"):
        replay.run(name, function if name == "one" else lambda: None)
    assert calls == ["default"]
    assert [graph is None for graph in replay.graphs.values()] == [False, True, False]
    assert cuda.num_captures == (2 if fails == "in the warm-up" else 3)
