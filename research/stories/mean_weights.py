"""Average the weights of models, such as a model and its fine-tuned version (Wortsman et al., arXiv 2109.01903).

    python -m research.stories.mean_weights last-11/model last-12/model TARGET

The configuration and the tokenizer are copied from the first model.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer
from safetensors.torch import load_file, save_file
from torch import Tensor

from nvium_core.errors import TrainingError

WEIGHTS = "model.safetensors"


def write_mean(models: Sequence[Path], target: Path) -> None:
    """Write the mean of models. Raise `TrainingError` if their weights differ in names or shapes."""
    all_weights = [load_file(model / WEIGHTS) for model in models]
    for model, weights in zip(models[1:], all_weights[1:], strict=True):
        if shapes(weights) != shapes(all_weights[0]):
            raise TrainingError(f"{model}: names or shapes of weights differ from those of {models[0]}")
    shutil.copytree(models[0], target, ignore=shutil.ignore_patterns(WEIGHTS))
    means = {name: mean([each[name] for each in all_weights]) for name in all_weights[0]}
    save_file(means, target / WEIGHTS, metadata={"format": "pt"})


def shapes(weights: dict[str, Tensor]) -> dict[str, torch.Size]:
    return {name: weight.shape for name, weight in weights.items()}


def mean(weights: Sequence[Tensor]) -> Tensor:
    """Average in float32, and round only the result."""
    return torch.stack([weight.float() for weight in weights]).mean(0).to(weights[0].dtype)


def main(
    models: Annotated[list[Path], typer.Argument(help="Folders of models with equal shapes, then the target folder.")],
) -> None:
    """Average the weights of models."""
    *sources, target = models
    if len(sources) < 2:
        raise typer.BadParameter("pass at least two model folders and a target folder")
    try:
        write_mean(sources, target)
    except (OSError, TrainingError) as error:
        raise typer.BadParameter(str(error)) from error


if __name__ == "__main__":
    typer.run(main)
