"""Steps of few rows on a GPU: fixed buffers, one copy there, CUDA graphs over them, one copy back.

What is replayed are functions of tensors that never move, for powers of two of rows. Without CUDA the functions are
called, so everything but the replaying itself is tested anywhere.
"""

from nvium_core.engine.device.graphs.backend import GraphsBackend

__all__ = ["GraphsBackend"]
