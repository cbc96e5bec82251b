"""The values that options accept, on the command line, in the environment and in Python, and that results have."""

from typing import Literal

Device = Literal["auto", "cpu", "cuda"]
Precision = Literal["auto", "float32", "bfloat16", "float16", "float64"]
CachePrecision = Literal["auto", "float32", "float16", "bfloat16"]
Instructions = Literal["auto", "baseline", "avx2", "avx512", "neon"]
Quantization = Literal["q8", "q4"]
Weights = Literal["auto", "native", "q8", "q4"]
Schedule = Literal["race", "whole", "sweep"]
Sampling = Literal["exits", "mixture", "original", "threshold"]
RouterKind = Literal["mlp", "linear"]
Norms = Literal["before", "after", "both"]
QKNorm = Literal["head", "width", "rotated head"]
Activation = Literal["silu", "gelu_pytorch_tanh", "relu2"]
LogLevel = Literal["debug", "info", "warning", "error"]
GenerationDefaults = Literal["auto", "off"]
ExitTarget = Literal["original", "text"]
FinishReason = Literal["stop", "length"]
