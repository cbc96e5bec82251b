"""Steps in one call, on a CPU, and exits and draws by themselves.

What the model's own layers compute operator by operator, each of which costs more than a small model's arithmetic.
Compiled where it runs; a machine without a compiler, and a model that has more than a plain Llama's parts, go on with
the layers.
"""

from nvium_core.engine.device.native.draw import draw_tokens
from nvium_core.engine.device.native.exits import NativeExits
from nvium_core.engine.device.native.library import native_library
from nvium_core.engine.device.native.steps import ANY_LENGTH, LONGEST, NativeSteps
from nvium_core.engine.device.native.weights import is_plain
from nvium_core.model.nvium import NviumForCausalLM

__all__ = ["ANY_LENGTH", "LONGEST", "NativeExits", "NativeSteps", "draw_tokens", "knows", "native_library"]


def knows(model: NviumForCausalLM) -> bool:
    """Whether this model can be run so, here."""
    return is_plain(model) and native_library() is not None
