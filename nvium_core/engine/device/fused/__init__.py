"""Layers over few rows as a few Triton kernels. A GPU with Triton uses them in its CUDA graphs."""
