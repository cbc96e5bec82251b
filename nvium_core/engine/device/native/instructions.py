"""Which instructions the native functions are built for: the widest that the processor has, or narrower ones."""

import platform

import torch

from nvium_core.choices import Instructions
from nvium_core.engine.params import require

FLAGS = {"baseline": (), "avx2": ("-march=x86-64-v3",), "avx512": ("-march=x86-64-v4",), "neon": ()}
"""Compiler flags; baseline is what every processor of the architecture has."""

X86_64 = "baseline", "avx2", "avx512"
NUM_OF_CAPABILITY = {"AVX2": 2, "AVX512": 3}
"""How many of those a processor has, by what PyTorch calls its capability."""


def instructions(asked: Instructions = "auto") -> str:
    """The name of what is used here. Raises `InvalidRequest` for what this processor does not have."""
    can = available()
    require(asked in ("auto", *can), "instructions", f"this processor has {', '.join(can)}; got {asked!r}")
    return can[-1] if asked == "auto" else asked


def limit(asked: Instructions) -> None:
    """What `auto` is from now on in this process. Raises `InvalidRequest`."""
    global _limit  # noqa: PLW0603  a process's, as the number of PyTorch's threads is
    _limit = None
    _limit = None if asked == "auto" else instructions(asked)


_limit: str | None = None


def available() -> tuple[str, ...]:
    """What this processor has and may use, the widest last."""
    can = _of_processor()
    return can[: can.index(_limit) + 1] if _limit else can


def _of_processor() -> tuple[str, ...]:
    if platform.machine().lower() in ("aarch64", "arm64"):
        return ("neon",)
    return X86_64[: NUM_OF_CAPABILITY.get(torch.backends.cpu.get_cpu_capability(), 1)]
