"""Tests. Without a GPU, Triton's interpreter runs its kernels; it must be chosen before anything imports Triton."""

import os

import torch

if not torch.cuda.is_available() and "TRITON_INTERPRET" not in os.environ:
    os.environ["TRITON_INTERPRET"] = "1"
