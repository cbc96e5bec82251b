"""Matrices in the form in which their files hold them: blocks of a GGUF type, or floats of any precision.

A stored matrix is a read-only tensor. PyTorch's operators see its numbers in `dtype`, converted whenever an operator
reads them. The native kernels pack the stored form instead. So a process needs no second copy of the weights.

Shapes: N rows, D row length, G groups, X numbers of a group, or bytes of a row.
"""

from collections import Counter
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from nvium_core.choices import Weights
from nvium_core.errors import CheckpointError

aten = torch.ops.aten

FLOATS = {
    torch.float64: GGMLQuantizationType.F64,
    torch.float32: GGMLQuantizationType.F32,
    torch.float16: GGMLQuantizationType.F16,
    torch.bfloat16: GGMLQuantizationType.BF16,
}
"""Types of unquantized numbers."""

QUANTIZED = {"q8": GGMLQuantizationType.Q8_0, "q4": GGMLQuantizationType.Q4_0}

GROUP = 32  # numbers that share a scale in Q8_0 and Q4_0


class StoredMatrix(Tensor):
    """A matrix [N, D] of type `kind`. Its rows are `content`'s, or those of the indices `rows` if given.

    content: blocks [·, X] as bytes, or floats [·, D]. If `kind` is quantized and `content` has floats, they are
        quantized whenever they are read.
    place: the file and the tensor, for errors; empty for a matrix built in memory.
    """

    content: Tensor
    kind: GGMLQuantizationType
    rows: Tensor | None
    place: str

    @staticmethod
    def __new__(
        cls: type["StoredMatrix"],
        content: Tensor,
        kind: GGMLQuantizationType | None = None,
        dtype: torch.dtype | None = None,
        *,
        rows: Tensor | None = None,
        place: str = "",
    ) -> "StoredMatrix":
        """`kind` defaults to the type of the content's floats; `dtype` to their precision, or float32 for blocks."""
        num_rows, width = len(content if rows is None else rows), content.shape[1]
        if content.dtype == torch.uint8:
            assert kind is not None
            per_block, block_bytes = GGML_QUANT_SIZES[kind]
            width = width // block_bytes * per_block
        dtype = dtype or (torch.float32 if content.dtype == torch.uint8 else content.dtype)
        matrix = Tensor._make_wrapper_subclass(cls, (num_rows, width), dtype=dtype)  # noqa: SLF001  PyTorch's protocol
        matrix.content, matrix.kind = content, kind or FLOATS[content.dtype]
        matrix.rows, matrix.place = rows, place
        return matrix

    def at(self, rows: slice | Tensor) -> "StoredMatrix":
        """Return these rows. They share the content."""
        if self.rows is None and isinstance(rows, slice):
            return StoredMatrix(self.content[rows], self.kind, self.dtype, place=self.place)
        index = torch.arange(len(self)) if self.rows is None else self.rows
        return StoredMatrix(self.content, self.kind, self.dtype, rows=index[rows], place=self.place)

    def held(self) -> Tensor:
        """Return the rows as `kind` stores them: blocks [N, X] as bytes, or floats [N, D]."""
        if (floats := self.floats_to_quantize()) is not None:
            return quantized(floats, self.kind)
        return self._content()

    def floats_to_quantize(self) -> Tensor | None:
        """Return the floats [N, D] that `held` quantizes, or None if it returns the content."""
        is_held = self.content.dtype == torch.uint8 or FLOATS[self.content.dtype] == self.kind
        return None if is_held else dequantize(self._content()).contiguous()

    def _content(self) -> Tensor:
        return self.content if self.rows is None else self.content.index_select(0, self.rows)

    def numbers(self) -> Tensor:
        """Return the numbers as an ordinary tensor in `dtype`, [N, D]."""
        held = self.held()
        if held.dtype == torch.uint8:
            with np.errstate(invalid="ignore"):  # of infinite scales
                held = torch.from_numpy(gguf.dequantize(held.numpy(), self.kind)).view(self.shape)
        return held.to(self.dtype).contiguous()

    def finite_numbers(self) -> Tensor:
        """Return the numbers. Raise `CheckpointError` if a matrix of a file has NaN or infinite values."""
        numbers = self.numbers()
        if self.place:
            check_finite(numbers, self.place)
        return numbers

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == Tensor.data.__set__:  # type: ignore[attr-defined]  # module.to() would leave content and dtype apart
            raise TypeError("a stored matrix is read-only; call `materialise` on the model first")
        # Before `__torch_dispatch__`, whose first call imports torch.distributed.tensor, which takes 0.6 s.
        if func == Tensor.detach:
            return args[0].at(slice(None))
        if func == Tensor.__getitem__ and isinstance(args[1], slice):
            return args[0].at(args[1])
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        first = args[0]
        if func is aten.detach.default:
            return first.at(slice(None))
        if func is aten.slice.Tensor and (len(args) == 1 or args[1] == 0):
            return first.at(slice(*args[2:]))
        if func is aten.embedding.default:
            ids = args[1]
            return first.at(ids.flatten()).numbers().view(*ids.shape, first.shape[1])
        if func._schema.is_mutable and isinstance(first, cls):  # noqa: SLF001
            raise TypeError("a stored matrix is read-only; call `materialise` on the model first")
        plain_args, plain_kwargs = tree_map_only(cls, cls.numbers, (args, kwargs or {}))
        return func(*plain_args, **plain_kwargs)


def dequantize(tensor: Tensor) -> Tensor:
    return tensor.numbers() if isinstance(tensor, StoredMatrix) else tensor


def check_finite(tensor: Tensor, name: str) -> None:
    if tensor.numel() and not all(map(torch.isfinite, torch.aminmax(tensor))):
        raise CheckpointError(f"{name} has NaN or infinite values")


def materialise(model: nn.Module) -> None:
    """Replace all stored matrices by ordinary parameters. Shared matrices stay shared.

    Raise `CheckpointError` if a matrix of a file has NaN or infinite values.
    """
    made = dict[int, nn.Parameter]()
    for module in model.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            if isinstance(weight, StoredMatrix):
                if id(weight) not in made:
                    made[id(weight)] = nn.Parameter(weight.finite_numbers(), weight.requires_grad)
                module.register_parameter(name, made[id(weight)])


def weight_type(model: nn.Module) -> tuple[str, float]:
    """Return the type in which most numbers are stored, such as Q4_K, and the mean bits of a number."""
    counts, num_bytes = Counter[str](), 0
    for weight in model.parameters():
        kind = weight.kind if isinstance(weight, StoredMatrix) else FLOATS[weight.dtype]
        block, block_bytes = GGML_QUANT_SIZES[kind]
        counts[kind.name] += weight.numel()
        num_bytes += weight.numel() // block * block_bytes
    return max(counts, key=lambda name: counts[name]), 8 * num_bytes / counts.total()


def quantized(weight_ND: Tensor, kind: GGMLQuantizationType) -> Tensor:
    """Quantize to Q8_0 or Q4_0. Return the blocks as bytes, [N, X].

    The scale of a group maps its largest element to 127 (its absolute value), or −8. Other elements are rounded. The
    function recovers the blocks of dequantized ones.
    """
    is_q8 = kind == GGMLQuantizationType.Q8_0
    groups_NGX = weight_ND.detach().double().unflatten(1, (-1, GROUP))
    extreme_NG1 = groups_NGX.gather(-1, groups_NGX.abs().argmax(-1, keepdim=True))
    scale_NG1 = (extreme_NG1.abs() / 127 if is_q8 else extreme_NG1 / -8).half()
    ratio_NGX = (groups_NGX / scale_NG1.double()).nan_to_num(0, 0, 0).round()
    if is_q8:
        numbers_NGX = ratio_NGX.clamp(-127, 127).to(torch.int8).view(torch.uint8)
    else:
        low, high = (ratio_NGX.clamp(-8, 7) + 8).to(torch.uint8).chunk(2, -1)
        numbers_NGX = low | high << 4
    return torch.cat([scale_NG1.view(torch.uint8), numbers_NGX], -1).flatten(1)


def quantize_model(model: nn.Module, kind: Weights) -> None:
    """If `kind` is q8 or q4, quantize the linear layers of backbone and head whose row length is a multiple of 32.

    Raise `CheckpointError` if a weight is not float32 or float64, which would round the dequantized numbers.
    """
    if kind not in QUANTIZED:
        return
    made = dict[int, nn.Parameter]()
    for name, layer in model.named_modules():
        is_weight = name.startswith("model.layers.") or name == "lm_head"
        if isinstance(layer, nn.Linear) and is_weight and layer.in_features % GROUP == 0:
            weight = layer.weight
            if weight.dtype not in (torch.float32, torch.float64):
                raise CheckpointError(f"weights: {kind} requires dtype float32: {weight.dtype} would round the weights")
            if not (isinstance(weight, StoredMatrix) and weight.kind == QUANTIZED[kind]):
                own = weight.place if isinstance(weight, StoredMatrix) else ""
                matrix = StoredMatrix(weight.detach(), QUANTIZED[kind], weight.dtype, place=own)
                made[id(weight)] = layer.weight = nn.Parameter(matrix, requires_grad=False)
    for module in model.modules():  # an embedding that is tied to the head
        if isinstance(module, nn.Embedding):
            module.weight = made.get(id(module.weight), module.weight)
