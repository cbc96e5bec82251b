"""Steps of few rows on a GPU: one copy to fixed buffers, one CUDA graph over them, one copy back.

A graph is a function of tensors that never move, for a power of two of rows. Without CUDA the functions are called, so
everything but the replay is tested anywhere.
"""

from nvium_core.engine.device.graphs.backend import GraphsBackend

__all__ = ["GraphsBackend"]
