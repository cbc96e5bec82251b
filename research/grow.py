"""Make a wider and deeper copy of a model, for further training, that computes the same function (arXiv 1511.05641).

    python -m research.grow SOURCE TARGET --layers 24 --width 256 --heads 4 --mlp-width 704

Weights that write to new channels start at zero, so the outputs do not change. Weights that read new channels start
with random values, so gradients flow. A new layer initially adds nothing to the residual stream.
"""

from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor, nn
from transformers import AutoTokenizer

from nvium_core.model.causal_lm import NviumForCausalLM
from nvium_core.model.config import NviumConfig
from nvium_core.model.exits import Adapter, Router
from nvium_core.model.llama import Attention, FeedForward, RMSNorm
from nvium_core.training.run_folder import write_model


def grown(
    model: NviumForCausalLM, *, layers: int, width: int, heads: int, mlp_width: int, seed: int = 0
) -> NviumForCausalLM:
    """Grow a model. Raise `ValueError` if `layers` is not a multiple of the model's, or if another size shrinks."""
    torch.manual_seed(seed)
    old = model.config
    repeats, remainder = divmod(layers, old.num_hidden_layers)
    if remainder or width < old.hidden_size or heads < old.num_attention_heads or mlp_width < old.intermediate_size:
        raise ValueError("--layers must be a multiple of the model's layers, and no other size may shrink")
    sizes = old.to_dict() | {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "intermediate_size": mlp_width,
        "exit_layers": [layer * repeats for layer in old.exit_layers or ()],
        "adapter_hidden_size": width,
        "router_hidden_size": None,
    }
    new = NviumForCausalLM(NviumConfig(**sizes))
    with torch.no_grad():
        silence(new)
        copy(model.model.embed_tokens.weight, new.model.embed_tokens.weight)
        copy(model.lm_head.weight, new.lm_head.weight)
        for number, layer in enumerate(model.model.layers):
            copy_module(layer, new.model.layers[number * repeats])
        for exit_, larger in zip(model.exits, new.exits, strict=True):
            copy_module(exit_, larger)
    return new


def silence(model: NviumForCausalLM) -> None:
    """Zero the embedding and the last matrix of each attention, MLP, adapter and router, so that nothing is added."""
    model.model.embed_tokens.weight.zero_()
    for module in model.modules():
        match module:
            case Attention():
                module.o_proj.weight.zero_()
            case FeedForward():
                module.down_proj.weight.zero_()
            case Adapter():
                module.down.weight.zero_()
            case Router():
                module.fc2.weight.zero_()


def copy_module(source: nn.Module, target: nn.Module) -> None:
    for (_, part), (_, larger) in zip(source.named_modules(), target.named_modules(), strict=True):
        for weight, place in zip(part.parameters(recurse=False), larger.parameters(recurse=False), strict=True):
            # new channels are zero, which lowers the mean square in RMSNorm; smaller weights compensate
            scale = (len(weight) / len(place)) ** 0.5 if isinstance(part, RMSNorm) else 1.0
            copy(weight * scale, place)


def copy(weight: Tensor, place: Tensor) -> None:
    place[tuple(slice(size) for size in weight.shape)] = weight.to(place.dtype)


def main(
    source: Annotated[Path, typer.Argument(help="Folder of a model without grouped-query attention.")],
    target: Annotated[Path, typer.Argument(help="Folder to write.")],
    layers: Annotated[int, typer.Option(help="Number of layers, a multiple of the model's.")],
    width: Annotated[int, typer.Option(help="Width of the residual stream.")],
    heads: Annotated[int, typer.Option(help="Number of heads, of the same size as the model's.")],
    mlp_width: Annotated[int, typer.Option(help="Width of the MLPs.")],
) -> None:
    """Write a larger model that computes the same function."""
    model = NviumForCausalLM.from_pretrained(source, dtype=torch.float32)
    try:
        larger = grown(model, layers=layers, width=width, heads=heads, mlp_width=mlp_width)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    write_model(larger.bfloat16(), AutoTokenizer.from_pretrained(source), target)


if __name__ == "__main__":
    typer.run(main)
