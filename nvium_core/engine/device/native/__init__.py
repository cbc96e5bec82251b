"""C++ that runs a whole Step in one call on a CPU, without the overhead of PyTorch's operators.

The C++ is compiled on the machine that runs it. PyTorch's layers run instead if there is no compiler, or if the model
has parts that the C++ does not implement.
"""

from nvium_core.choices import Instructions
from nvium_core.engine.device.native.library import native_library
from nvium_core.engine.device.native.weights import implements
from nvium_core.engine.device.processor import instructions
from nvium_core.model.nvium import Nvium

__all__ = ["native_library", "supports"]


def supports(model: Nvium, choice: Instructions = "auto") -> bool:
    """Whether the native functions can run this model here with these instructions."""
    return implements(model) and native_library(instructions(choice)) is not None
