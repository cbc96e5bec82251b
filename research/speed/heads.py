"""Measure time and peak memory of the exits' training losses, computed from whole logits and in parts.

Each measurement runs in its own process, so that the peaks are independent.
"""

import json
import time
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import median

import torch
from torch import Tensor
from torch.nn import functional as F

from nvium_core.bench.figures import Figures, write_json
from nvium_core.bench.harness import ratio
from nvium_core.bench.shapes import shape_config
from nvium_core.model.nvium import token_nll
from nvium_core.training.objective.cross_entropy import min_split_rows, split_head_nll

WHOLE, PARTS = "whole", "parts"

METHODS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    WHOLE: lambda output_XD, head_VD, target_X: token_nll(F.linear(output_XD, head_VD), target_X),
    PARTS: split_head_nll,
}


def measure(shape: str, tokens: int, repeats: int, device: str) -> Figures:
    """Return medians, and the median ratios of parts to whole logits."""
    config, threads = shape_config(shape), torch.get_num_threads()
    sizes = (config.num_exits, tokens, config.hidden_size, config.vocab_size)
    turns: dict[str, list[Figures]] = {method: [] for method in METHODS}
    for _ in range(repeats):
        for method, taken in turns.items():
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
                taken.append(process.submit(pass_cost, method, sizes, device, threads).result())
    found = {
        name: {method: [turn[name] for turn in turns[method]] for method in METHODS}
        for name in ("seconds", "peak_bytes")
    }
    return {
        "shape": shape,
        "tokens": tokens,
        "parts_from_tokens": min_split_rows(config.vocab_size),
        **{name: {method: median(values) for method, values in by_method.items()} for name, by_method in found.items()},
        **{f"{name}_ratio": ratio(name, of[PARTS], of[WHOLE])[name] for name, of in found.items()},
    }


def pass_cost(method: str, sizes: tuple[int, int, int, int], device: str, threads: int) -> Figures:
    """Run two passes. Return the seconds of the second pass, and the peak of both minus the memory at the start."""
    torch.set_num_threads(threads)
    num_exits, num_rows, width, vocab_size = sizes
    head_VD = torch.randn(vocab_size, width, device=device, requires_grad=True)
    outputs = [torch.randn(num_rows, width, device=device, requires_grad=True) for _ in range(num_exits)]
    target_R = torch.randint(vocab_size, (num_rows,), device=device)
    is_cuda = device.startswith("cuda")
    before = torch.cuda.memory_allocated() if is_cuda else process_bytes("VmRSS")
    seconds = 0.0
    for _ in range(2):
        started = time.perf_counter()
        nll = torch.stack([METHODS[method](output_RD, head_VD, target_R) for output_RD in outputs], dim=-1)
        torch.logsumexp(-nll, dim=-1).mean().backward()
        if is_cuda:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - started
    peak = torch.cuda.max_memory_allocated() if is_cuda else process_bytes("VmHWM")
    return {"seconds": seconds, "peak_bytes": peak - before}


def process_bytes(name: str) -> int:
    """Read a field of /proc/self/status, in bytes. `getrusage` is unsuitable: its peak includes the parent process."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(prog="python -m research.speed.heads", description=__doc__)
    parser.add_argument("--shape", default="24x768", help="layers x width [24x768]")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    args = parser.parse_args(arguments)
    found = measure(args.shape, args.tokens, args.repeats, args.device)
    print(json.dumps(found, indent=1))
    if args.json:
        write_json(found, args.json)


if __name__ == "__main__":
    main()
