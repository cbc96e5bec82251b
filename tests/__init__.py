"""Tests. Without a GPU, Triton's interpreter runs its kernels; it must be chosen before anything imports Triton."""

import os
import sys

import torch

sys.modules["rfc3987_syntax"] = None  # jsonschema would compile its 38 grammars: formats that no test checks

if not torch.cuda.is_available() and "TRITON_INTERPRET" not in os.environ:
    os.environ["TRITON_INTERPRET"] = "1"
