"""Measure how long a GPU would wait for the host between passes, without a GPU.

    python -m research.bubble --streams 1:0.9,256:5.7 --json bubble.json

The back end for CUDA graphs runs on a device that only sleeps: a pass takes the given milliseconds and emits a token
for every stream. The host's work is real. The bubble is the time between the end of a pass and the launch of the next.
`host_ms` is the host's processor time for a pass, without waiting and without the first passes: unlike the bubble, it
hardly depends on what else runs.
"""

import argparse
import gc
import json
import time
from collections.abc import Callable, Hashable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from nvium_core import Engine, EngineConfig, NviumConfig, NviumForCausalLM, SamplingParams
from nvium_core.engine.device.decide import EMITTED, EXIT_TAKEN
from nvium_core.engine.device.graphs.backend import GraphsBackend
from nvium_core.engine.device.graphs.replay import Fence, Replay
from nvium_core.engine.device.paged_cache import PagedCache
from nvium_core.engine.device.runner import Runner
from nvium_core.model.nvium import Nvium

PASSES, SKIPPED = 60, 10
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


def bubble(num_streams: int, milliseconds: float) -> dict[str, float]:
    """Generate with `num_streams` streams on a device with passes of `milliseconds`."""
    device = SleepingDevice(milliseconds / 1000)

    def make_backend(model: Nvium, cache: PagedCache, config: EngineConfig) -> GraphsBackend:
        unused: Any = None
        made = GraphsBackend(model, cache, unused, unused, unused, lambda _: SleepingFence(device))
        made.replay, device.answers = device, made.answers
        return made

    model = NviumForCausalLM(
        NviumConfig(
            vocab_size=64,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=4,
            num_attention_heads=1,
            exit_layers=[1, 2, 3, 4],
            max_position_embeddings=256,
        )
    )
    config = EngineConfig(schedule="whole", max_sequences=num_streams, cache_tokens=512 * num_streams, page_size=256)
    engine = Engine(model, config, make_runner=partial(Runner, make_backend=make_backend))
    gc.collect()
    gc.freeze()  # as in a server
    engine.generate([[0]] * num_streams, SamplingParams(max_tokens=PASSES, ignore_eos=True, sampling="exits"))
    found, host_at = device.bubbles[SKIPPED:], device.host_at[SKIPPED - 1 :]
    return {
        "streams": num_streams,
        "pass_ms": milliseconds,
        "passes": len(found),
        "host_ms": 1000 * (host_at[-1] - host_at[0]) / len(found),
        "median_bubble_us": 1e6 * median(found),
        "mean_bubble_us": 1e6 * sum(found) / len(found),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", default="1:0.9,256:5.7", help="STREAMS:MILLISECONDS of a pass, …")
    parser.add_argument("--json", type=Path, help="append the rows to this file")
    arguments = parser.parse_args()
    pairs = [each.split(":") for each in arguments.streams.split(",")]
    rows = [bubble(int(streams), float(milliseconds)) for streams, milliseconds in pairs]
    print(json.dumps(rows, indent=1))
    if arguments.json:
        before = json.loads(arguments.json.read_text()) if arguments.json.exists() else []
        arguments.json.write_text(json.dumps(before + rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
