"""Capturing, with a stand-in for CUDA: what is captured is replayed, and after a capture that fails nothing is."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from nvium_core.engine.device.graphs.replay import NUM_WARM_UPS, Replay

CUDA = torch.device("cuda:1")


class Graph:
    """Counts."""

    num_replays = 0

    def replay(self) -> None:
        self.num_replays += 1


class Cuda:
    """Its streams have names. A capture may fail when it ends, and leaves the thread on its stream then."""

    CUDAGraph = Graph

    def __init__(self) -> None:
        self.stream_now = "default"
        self.fails = False
        self.num_captures = 0
        self.num_streams = 0

    def graph_pool_handle(self) -> str:
        return "pool"

    def current_stream(self, device: torch.device) -> SimpleNamespace:
        assert device == CUDA
        return SimpleNamespace(name=self.stream_now, wait_stream=lambda _: None)

    def Stream(self, device: torch.device) -> SimpleNamespace:  # noqa: N802 (PyTorch's name)
        assert device == CUDA
        self.num_streams += 1
        return SimpleNamespace(name="aside", wait_stream=lambda _: None)

    def set_stream(self, stream: SimpleNamespace) -> None:
        self.stream_now = stream.name

    @contextmanager
    def stream(self, stream: SimpleNamespace) -> Iterator[None]:
        before, self.stream_now = self.stream_now, stream.name
        yield
        self.stream_now = before

    @contextmanager
    def graph(self, graph: Graph, *, pool: str, stream: SimpleNamespace, capture_error_mode: str) -> Iterator[None]:
        assert (pool, stream.name, capture_error_mode) == ("pool", "aside", "thread_local")
        self.num_captures += 1
        before, self.stream_now = self.stream_now, "capture"
        yield
        if self.fails:
            raise RuntimeError("an operation is not permitted when a stream is capturing")
        self.stream_now = before


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    cuda = Cuda()
    monkeypatch.setattr(torch, "cuda", cuda)
    return cuda


def test_a_function_is_captured_once(cuda: Cuda) -> None:
    replay, calls = Replay(CUDA), list[str]()
    assert replay.captures
    for _ in range(3):
        replay.run("one", lambda: calls.append(cuda.stream_now))
    (graph,) = replay.graphs.values()
    assert isinstance(graph, Graph)
    assert (cuda.num_captures, graph.num_replays) == (1, 3)
    assert calls == ["aside"] * NUM_WARM_UPS + ["capture"]


def test_all_are_warmed_up_and_captured_on_one_stream(cuda: Cuda) -> None:
    replay = Replay(CUDA)
    for name in range(5):
        replay.run(name, lambda: None)
    assert (cuda.num_captures, cuda.num_streams) == (5, 1)


def test_after_a_capture_that_fails_nothing_is_replayed_and_the_stream_is_what_it_was(
    cuda: Cuda, caplog: pytest.LogCaptureFixture
) -> None:
    replay, calls = Replay(CUDA), list[str]()
    replay.run("before", lambda: None)
    cuda.fails = True
    replay.run("one", lambda: calls.append(cuda.stream_now))
    assert cuda.stream_now == "default"
    assert calls[-1] == "default"
    assert "cannot be a CUDA graph" in caplog.text
    cuda.fails = False
    for name in ("before", "one", "another"):
        calls.clear()
        replay.run(name, lambda: calls.append(cuda.stream_now))
        assert calls == ["default"]
    assert cuda.num_captures == 2
    assert not replay.captures
