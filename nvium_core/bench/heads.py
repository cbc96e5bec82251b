"""What the exits' losses cost in training: time and peak memory, with whole logits and with logits in chunks.

Each pass, forward and backward through the heads of all exits, runs in a process of its own, so that peaks do not mix.
"""

import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import median

import torch
from rich.progress import track
from rich.table import Table
from torch import Tensor
from torch.nn import functional as F

from nvium_core.bench.harness import Figures, Subject, median_ratio, shown
from nvium_core.model.nvium import token_nll
from nvium_core.training.objective.cross_entropy import chunked_head_nll, min_chunked_rows


def held_head_nll(output_XD: Tensor, head_VD: Tensor, target_X: Tensor) -> Tensor:
    return token_nll(F.linear(output_XD, head_VD), target_X)


WAYS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {"held": held_head_nll, "chunked": chunked_head_nll}


def measure(subject: Subject, *, tokens: int = 4096, repeats: int = 3) -> Figures:
    """A pass over `tokens` rows at every exit, both ways in turns. Training chunks from `chunked_from_tokens` on."""
    config, threads = subject.model.config, torch.get_num_threads()
    shape = (config.num_exits, tokens, config.hidden_size, config.vocab_size)

    turns: dict[str, list[Figures]] = {way: [] for way in WAYS}
    for _ in track(range(repeats), "passes", transient=True):
        for way, taken in turns.items():
            taken.append(in_process_of_its_own(way, shape, str(subject.model.device), threads))
    rows = {way: {name: median(turn[name] for turn in taken) for name in taken[0]} for way, taken in turns.items()}
    chunked, held = turns["chunked"], turns["held"]
    return {
        "exits": config.num_exits,
        "tokens": tokens,
        "width": config.hidden_size,
        "vocabulary": config.vocab_size,
        "chunked_from_tokens": min_chunked_rows(config.vocab_size),
        "ways": rows,
        "peak_ratio": median_ratio([t["peak_bytes"] for t in chunked], [t["peak_bytes"] for t in held]),
        "time_ratio": median_ratio([t["seconds"] for t in chunked], [t["seconds"] for t in held]),
    }


def in_process_of_its_own(way: str, shape: tuple[int, int, int, int], device: str, threads: int) -> Figures:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(pass_cost, way, shape, device, threads).result()


def pass_cost(way: str, shape: tuple[int, int, int, int], device: str, threads: int) -> Figures:
    """Seconds of the second pass, and peak bytes of both above the start."""
    torch.set_num_threads(threads)
    num_exits, num_rows, width, vocab_size = shape
    head_VD = torch.randn(vocab_size, width, device=device, requires_grad=True)
    outputs = [torch.randn(num_rows, width, device=device, requires_grad=True) for _ in range(num_exits)]
    target_R = torch.randint(vocab_size, (num_rows,), device=device)
    before = held_bytes(device)
    seconds = 0.0
    for _ in range(2):
        started = time.perf_counter()
        nll = torch.stack([WAYS[way](output_RD, head_VD, target_R) for output_RD in outputs], dim=-1)
        torch.logsumexp(-nll, dim=-1).mean().backward()
        if head_VD.is_cuda:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - started
    return {"seconds": seconds, "peak_bytes": peak_bytes(device) - before}


def held_bytes(device: str) -> int:
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    return process_bytes("VmRSS")


def peak_bytes(device: str) -> int:
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated()
    return process_bytes("VmHWM")


def process_bytes(name: str) -> int:
    """A field of this process's /proc status. (`getrusage`'s peak starts from the parent's.)"""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    kilobytes = next(line.split()[1] for line in lines if line.startswith(f"{name}:"))
    return 1024 * int(kilobytes)


def table(figures: Figures) -> Table:
    """Both ways, and their ratio."""
    found = Table("logits", "peak MB", "ms", title=f"{figures['exits']} exits, {figures['tokens']:,} tokens")
    if figures["tokens"] < figures["chunked_from_tokens"]:
        found.caption = (
            f"Training holds logits of so few tokens: see --tokens {figures['chunked_from_tokens']} and more."
        )
    for way, row in figures["ways"].items():
        found.add_row(way, shown(row["peak_bytes"] / 1e6), shown(1000 * row["seconds"]))
    found.add_row("ratio", shown(figures["peak_ratio"]), shown(figures["time_ratio"]))
    return found
