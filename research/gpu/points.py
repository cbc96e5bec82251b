"""The measurements that `research.on_gpu` makes itself: `python -m research.gpu.points PART --json FILE`.

Every point is written to the file at once, so a part that is stopped keeps its points. Weights are random.
"""

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, LlamaConfig

from nvium_core import Engine, EngineConfig, SamplingParams
from nvium_core.bench.figures import BUFFER_BYTES, least_seconds, read_rate
from nvium_core.bench.shapes import PAPER_ROUTING, force_routing, random_weights, shape_config
from nvium_core.model.causal_lm import NviumForCausalLM
from nvium_core.model.config import NviumConfig
from research.random_folder import LLAMA_3_2_1B

Point = dict[str, Any]

TINY = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 2, "head_dim": 4}
"""Changes of the 1B model for `--tiny`."""

KINDS: dict[str, dict[str, Any]] = {"plain": {}, "greedy": {"temperature": 0.0}, "top-p": {"top_p": 0.9}}
GROUPS = {
    "decisions": ("triton_", "sort", "topk"),
    "attention": ("attend", "combine", "flash", "fmha", "scaled_dot"),
    "products": ("gemm", "gemv", "linear", "mm", "cutlass", "splitk", "cublas", "nvjet"),
}
"""Parts of kernels' names. The first group that matches counts; all other kernels are "elementwise"."""


class Measurement:
    def __init__(self, device: str, *, is_tiny: bool) -> None:
        self.device, self.is_tiny = torch.device(device), is_tiny
        self.dtype = torch.float32 if is_tiny else torch.bfloat16
        self.llama = LLAMA_3_2_1B | (TINY if is_tiny else {})

    def model(self, shape: str) -> NviumForCausalLM:
        """Return the dense 1B model, or one of this shape with the paper's exit shares."""
        if shape == "1B":
            return random_weights(NviumConfig(**self.llama, exit_layers=None), dtype=self.dtype, device=self.device)
        model = random_weights(shape_config(shape), dtype=self.dtype, device=self.device)
        force_routing(model, PAPER_ROUTING)
        return model

    def machine(self) -> Iterator[Point]:
        """Yield versions, bandwidth, and the time of a node that does nothing."""
        versions = {}
        for name in ("torch", "triton", "transformers"):
            try:
                versions[name] = version(name)
            except PackageNotFoundError:
                versions[name] = "absent"
        on_gpu = self.device.type == "cuda"
        yield versions | {"card": torch.cuda.get_device_name() if on_gpu else "cpu"}
        yield {"bytes_per_second": read_rate(self.device, 2**24 if self.is_tiny else BUFFER_BYTES)}
        number, count, graph = torch.zeros(1, device=self.device), 1000, torch.cuda.CUDAGraph() if on_gpu else None
        if graph is not None:
            with torch.cuda.graph(graph):
                for _ in range(count):
                    number.add_(1)
        seconds = least_seconds(graph.replay if graph else lambda: [number.add_(1) for _ in range(count)])
        yield {"node_us": 1e6 * seconds / count}

    def kernels(self) -> Iterator[Point]:
        """Yield the device's time per token by group of kernels, for kinds of requests and numbers of sequences."""
        for shape in ("4x128",) if self.is_tiny else ("24x768", "1B"):
            model = self.model(shape)
            for count in (1, 2) if self.is_tiny else (1, 256):
                engine = self.engine(model, count)
                for kind, wishes in KINDS.items():
                    yield {"shape": shape, "sequences": count, "kind": kind} | self.by_group(engine, count, wishes)

    def by_group(self, engine: Engine, count: int, wishes: dict[str, Any]) -> Point:
        """Profile 32 tokens of each sequence. Calls of the C++ kernels are not seen."""
        add(engine, count, num_tokens=32, **wishes)
        with profile(activities=[ProfilerActivity.CPU, *self.cuda_activity()]) as profiled:
            num_tokens = drain(engine)
        times, num_kernels = defaultdict[str, float](float), 0
        for event in profiled.key_averages():
            taken = event.self_device_time_total if self.device.type == "cuda" else event.self_cpu_time_total
            if taken:
                names = (group for group, parts in GROUPS.items() if any(part in event.key.lower() for part in parts))
                times[next(names, "elementwise")] += taken
                num_kernels += event.count
        return {"kernels": num_kernels, "tokens": num_tokens, "us": dict(times)}

    def cuda_activity(self) -> list[ProfilerActivity]:
        return [ProfilerActivity.CUDA] if self.device.type == "cuda" else []

    def dense(self) -> Iterator[Point]:
        """Yield tokens per second of the dense 1B model, and as a share of what the bandwidth allows."""
        model = self.model("1B")
        num_bytes = sum(each.nbytes for each in model.parameters())
        limit = read_rate(self.device, 2**24 if self.is_tiny else BUFFER_BYTES) / num_bytes
        for count in (1, 2) if self.is_tiny else (1, 8, 32, 64, 128, 256):
            engine = self.engine(model, count)
            for kind in ("plain", "greedy"):
                rate = self.rate(engine, count, **KINDS[kind])
                point = {"sequences": count, "kind": kind, "tokens_per_second": rate, "share": rate / limit / count}
                yield point | {"processor": engine.runner.processor, "eager_passes": engine.runner.eager_passes}

    def rate(self, engine: Engine, count: int, **wishes: Any) -> float:
        add(engine, count, num_tokens=8 if self.is_tiny else 128, **wishes)
        started = time.perf_counter()
        return drain(engine) / (time.perf_counter() - started)

    def transformers(self) -> Iterator[Point]:
        """Yield tokens per second of transformers with the same model, eager and with a static cache, compiled."""
        shape = {name: value for name, value in self.llama.items() if name != "adapter_hidden_size"}
        with torch.device(self.device):
            model = AutoModelForCausalLM.from_config(LlamaConfig(**shape), dtype=self.dtype).eval()
        num_tokens = 8 if self.is_tiny else 128
        for cache in (None, "static"):
            for count in (1, 2) if self.is_tiny else (1, 32):
                ids = torch.ones(count, 8, dtype=torch.long, device=self.device)
                wishes = {"max_new_tokens": num_tokens, "min_new_tokens": num_tokens, "do_sample": False}
                for turn in ("first", "second"):
                    started = time.perf_counter()
                    model.generate(ids, attention_mask=ids, cache_implementation=cache, **wishes)[0].tolist()
                    rate = count * num_tokens / (time.perf_counter() - started)
                    yield {"sequences": count, "cache": cache or "dynamic", "turn": turn, "tokens_per_second": rate}

    def prompts(self) -> Iterator[Point]:
        """Yield the time to the first token of a prompt, of the shape with exits and of the dense 1B model."""
        for shape in ("4x128",) if self.is_tiny else ("24x768", "1B"):
            engine = self.engine(self.model(shape), 1)
            for length in (16, 64) if self.is_tiny else (512, 1000 if shape == "24x768" else 4096):
                for turn in range(3):
                    engine.add("prompt", [turn] * length, SamplingParams(max_tokens=1), cache_salt=str(turn))
                    started = time.perf_counter()
                    drain(engine)
                    yield {"shape": shape, "prompt": length, "seconds": time.perf_counter() - started}

    def engine(self, model: NviumForCausalLM, count: int) -> Engine:
        engine = Engine(model, EngineConfig(max_sequences=count, schedule="whole"))
        engine.warm_up()
        return engine


def add(engine: Engine, count: int, *, num_tokens: int, **wishes: Any) -> None:
    for number in range(count):
        params = SamplingParams(max_tokens=num_tokens, seed=number, ignore_eos=True, **wishes)
        engine.add(str(number), [1, number % 512], params)


def drain(engine: Engine) -> int:
    return sum(1 for _ in engine.run())


PARTS = ("machine", "kernels", "dense", "transformers", "prompts")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    points = list[Point]()
    for point in getattr(Measurement(args.device, is_tiny=args.tiny), args.part)():
        points.append(point)
        print(json.dumps(point), flush=True)
        args.json.write_text(json.dumps(points, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
