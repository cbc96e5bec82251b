"""Steps in one call, on a CPU.

What the model's own layers compute operator by operator, each of which costs more than a small model's arithmetic.
Compiled where it runs; without a compiler, and for a model with parts that block.h does not know, the layers run.
"""

from nvium_core.choices import Instructions
from nvium_core.engine.device.native.instructions import available, instructions, limit
from nvium_core.engine.device.native.library import native_library
from nvium_core.engine.device.native.weights import is_plain
from nvium_core.model.nvium import Nvium

__all__ = ["available", "instructions", "knows", "limit", "native_library"]


def knows(model: Nvium, asked: Instructions = "auto") -> bool:
    """Whether this model can run natively here, with these instructions."""
    return is_plain(model) and native_library(instructions(asked)) is not None
