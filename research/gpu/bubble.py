"""Measure how long a GPU would wait for the host between passes, without a GPU.

    python -m research.gpu.bubble --streams 1:0.9,256:5.7 --json bubble.json

The back end for CUDA graphs runs on a device that only sleeps: a pass takes the given milliseconds and emits a token
for every stream. The host's work is real. The bubble is the time between the end of a pass and the launch of the next.
`host_ms` is the host's processor time for a pass, without waiting and without the first passes: unlike the bubble, it
hardly depends on what else runs.
"""

import argparse
import gc
import json
import time
from collections.abc import Callable, Hashable, Sequence
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import torch

from nvium_core import Engine, EngineConfig, NviumConfig, NviumForCausalLM, SamplingParams
from nvium_core.bench.figures import write_json
from nvium_core.engine.device.decide import EMITTED, EXIT_TAKEN
from nvium_core.engine.device.graphs.backend import Graph, GraphsBackend
from nvium_core.engine.device.graphs.capture import Fence, Replay
from nvium_core.engine.device.paged_cache import PagedCache
from nvium_core.engine.events import TokenEvent
from nvium_core.engine.schedule.step import Rows
from nvium_core.model.nvium import Nvium

PASSES, SKIPPED = 60, 10
EVERY = 4  # passes between two arrivals
SPIN_SECONDS = 0.0003  # time.sleep() may wake up this late


class SleepingDevice(Replay):
    """A device whose passes take `seconds`, one after another.

    `bubbles`: seconds that it waited for each launch. `host_at`: the host's processor time at each launch.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__(torch.device("cpu"))
        self.seconds, self.free_at, self.bubbles, self.host_at = seconds, 0.0, list[float](), list[float]()
        self.answers, self.spun_seconds = torch.zeros(0), 0.0

    def run(self, name: Hashable, function: Callable[[], None]) -> None:
        now = time.perf_counter()
        self.host_at.append(time.thread_time() - self.spun_seconds)
        self.bubbles.append(max(0.0, now - self.free_at))
        self.free_at = max(now, self.free_at) + self.seconds
        self.answers[EMITTED], self.answers[EXIT_TAKEN] = 1, 0

    def wait_until(self, at: float) -> None:
        time.sleep(max(0.0, at - time.perf_counter() - SPIN_SECONDS))
        started = time.thread_time()
        while time.perf_counter() < at:
            pass
        self.spun_seconds += time.thread_time() - started


class SleepingFence(Fence):
    def __init__(self, device: SleepingDevice) -> None:
        self._device, self._at = device, 0.0

    def set(self) -> None:
        self._at = self._device.free_at

    def wait(self) -> None:
        self._device.wait_until(self._at)


class SleepingBackend(GraphsBackend):
    """Runs all passes on the device, also those of PyTorch's operators."""

    def __init__(self, model: Nvium, cache: PagedCache, device: SleepingDevice) -> None:
        unused: Any = None
        super().__init__(model, cache, unused, unused, make_fence=lambda _: SleepingFence(device))
        self.replay, device.answers = device, self.answers

    def forward(self, block: int, rows: Sequence[Rows]) -> None:
        if block == 0:
            self.replay.run("operators", lambda: None)

    def compute(self, graph: Graph, compiler: object = None) -> None:
        """The device has written the answers."""


def bubble(num_streams: int, milliseconds: float, prompt_tokens: int) -> dict[str, float]:
    """Generate with `num_streams` streams on a device with passes of `milliseconds`.

    With `prompt_tokens`, a stream ends after every fourth pass, and the next one starts with such a prompt.
    """
    device = SleepingDevice(milliseconds / 1000)
    model = NviumForCausalLM(
        NviumConfig(
            vocab_size=64,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=4,
            num_attention_heads=1,
            exit_layers=[1, 2, 3, 4],
            max_position_embeddings=2048,
        )
    )
    length = EVERY * num_streams if prompt_tokens else PASSES
    cache_tokens = num_streams * (prompt_tokens + length + 512)
    config = EngineConfig(schedule="whole", max_sequences=num_streams, cache_tokens=cache_tokens, page_size=256)
    engine = Engine(model, config, make_backend=lambda model, cache, _: SleepingBackend(model, cache, device))
    numbers = count()

    def add(prompt: list[int], num_tokens: int) -> None:
        params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, sampling="exits")
        engine.add(str(next(numbers)), prompt, params)

    gc.collect()
    gc.freeze()  # as in a server
    for stream in range(num_streams):
        add([0], EVERY * (1 + stream) if prompt_tokens else length)
    while len(device.bubbles) < PASSES and engine.has_work:
        for event in engine.step():
            if prompt_tokens and isinstance(event, TokenEvent) and event.finish_reason:
                add([len(device.bubbles) % 64] * prompt_tokens, length)
    found, host_at = device.bubbles[SKIPPED:], device.host_at[SKIPPED - 1 :]
    return {
        "streams": num_streams,
        "pass_ms": milliseconds,
        "prompt_tokens": prompt_tokens,
        "passes": len(found),
        "host_ms": 1000 * (host_at[-1] - host_at[0]) / len(found),
        "median_bubble_us": 1e6 * median(found),
        "mean_bubble_us": 1e6 * sum(found) / len(found),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", default="1:0.9,256:5.7", help="STREAMS:MILLISECONDS of a pass, …")
    parser.add_argument("--prompt", type=int, default=0, help="tokens of the prompts that arrive [no arrivals]")
    parser.add_argument("--json", type=Path, help="append the rows to this file")
    arguments = parser.parse_args()
    pairs = [each.split(":") for each in arguments.streams.split(",")]
    rows = [bubble(int(streams), float(milliseconds), arguments.prompt) for streams, milliseconds in pairs]
    print(json.dumps(rows, indent=1))
    if arguments.json:
        before = json.loads(arguments.json.read_text()) if arguments.json.exists() else []
        write_json(before + rows, arguments.json)


if __name__ == "__main__":
    main()
