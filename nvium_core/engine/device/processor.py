"""The CPU of this process: vector instructions of the native functions, and threads."""

import platform

import torch

from nvium_core.choices import Instructions
from nvium_core.engine.config import thread_count
from nvium_core.engine.errors import require

X86_64 = "baseline", "avx2", "avx512"
_limit: str | None = None


def instructions(choice: Instructions = "auto") -> str:
    """Return the chosen instruction set; `auto` is the widest. Raise `InvalidRequest` if this processor lacks it."""
    names = available()
    message = f"must be one of auto, {', '.join(names)} on this processor, got {choice!r}"
    require(choice in ("auto", *names), "instructions", message)
    return names[-1] if choice == "auto" else choice


def available() -> tuple[str, ...]:
    """Return the instruction sets that this process may use on this processor, the widest last."""
    if platform.machine().lower() in ("aarch64", "arm64"):
        return ("neon",)
    capability = torch.backends.cpu.get_cpu_capability().lower()
    widest = _limit or (capability if capability in X86_64 else "baseline")
    return X86_64[: X86_64.index(widest) + 1]


def use_processor(choice: Instructions, threads: str) -> None:
    """Make `auto` mean this choice in this process, and set the number of threads.

    Raise `InvalidRequest` if this CPU lacks the instructions or `threads` is invalid.
    """
    global _limit  # noqa: PLW0603  per process, like PyTorch's number of threads
    _limit = None
    _limit = None if choice == "auto" else instructions(choice)
    use_threads(threads)


def use_threads(threads: str) -> None:
    """Set PyTorch's number of threads, unless it is `auto`. Raise `InvalidRequest` if the text is not a number."""
    if count := thread_count(threads):
        torch.set_num_threads(count)
