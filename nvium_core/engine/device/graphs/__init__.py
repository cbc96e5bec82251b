"""Steps of few rows on a GPU: fixed buffers, one copy there, CUDA graphs over them, one copy back.

What is replayed are plain functions of tensors that never move, for powers of two of rows. Where there are no CUDA
graphs the functions are called, so that everything but the replaying itself can be held equal to the layers anywhere.
"""

from nvium_core.engine.device.graphs.steps import StaticSteps

__all__ = ["StaticSteps"]
