"""Compile the kernels of the layers for an H100, which needs no GPU: `python -m tests.engine.device.fused.compiled`.

Not under Triton's interpreter.
"""

from itertools import product
from typing import Any, get_args

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from nvium_core.choices import CachePrecision
from tests.engine.device.fused.nodes import nodes_of_layers
from tests.engine.device.fused.test_nodes import SHAPES

H100 = GPUTarget("cuda", 90, 32)
TYPES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.float64: "*fp64"}
TYPES |= {torch.int64: "*i64"}


def type_of(value: Any) -> str:
    return TYPES[value.dtype] if isinstance(value, Tensor) else "fp32" if isinstance(value, float) else "i32"


def main() -> None:
    done: set[tuple[Any, ...]] = set()
    for config in SHAPES.values():
        for num_rows, choice in product((1, 64), get_args(CachePrecision)):
            nodes = nodes_of_layers(config, range(config.num_exits), num_rows, choice)
            for kernel, arguments, constants in nodes.launches:
                names = kernel.arg_names
                given = dict(zip(names, arguments, strict=False))
                constants |= {name: None for name, value in given.items() if value is None}
                types = {name: type_of(value) for name, value in given.items() if value is not None}
                key = (kernel, *types.items(), *((name, str(value)) for name, value in constants.items()))
                if key not in done:
                    done.add(key)
                    values = {(names.index(name),): value for name, value in constants.items()}
                    source = ASTSource(kernel, types | dict.fromkeys(constants, "constexpr"), values)
                    compiled = triton.compile(source, target=H100)
                    print(kernel.__name__, len(compiled.asm["cubin"]), "bytes")  # noqa: T201 (a command)


if __name__ == "__main__":
    main()
