"""What a run starts from: random weights, a trained model, or a Llama that exits are put on; and whose tokenizer."""

from pathlib import Path

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from nvium_core.model.checkpoint import resolve_folder
from nvium_core.model.config import NviumConfig
from nvium_core.model.nvium import NviumForCausalLM
from nvium_core.training.chat.template import give_chat_template
from nvium_core.training.errors import TrainingError
from nvium_core.training.recipes.recipe import Recipe
from nvium_core.training.recipes.twins import RUN
from nvium_core.training.retrofitting.papers_start import retrofit

SHAPE = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "exit_layers",
    "router_hidden_size",
    "adapter_hidden_size",
    "tie_word_embeddings",
)
"""What a model that is trained on and the recipe must agree in."""


def initial_model(recipe: Recipe, vocab_size: int, end_token: int) -> NviumForCausalLM:
    """The model of a recipe before its first step, in float32.

    Raises `CheckpointError` for an `initial` that cannot be read, `RetrofitError` for one that exits cannot be put on,
    and `TrainingError` for one of another shape than the recipe's.
    """
    expected = recipe.shape.config(vocab_size, end_token)
    if recipe.initial is None:
        return NviumForCausalLM(expected)
    if recipe.method == "retrofit":
        model = retrofit(recipe.initial, recipe.shape.exit_depths)
    else:
        model = NviumForCausalLM.from_pretrained(recipe.initial, dtype=torch.float32)
    check_shape(recipe.initial, model.config, expected)
    return model


def check_initial(recipe: Recipe) -> None:
    """Raise `TrainingError` if the run that a recipe goes on from has left no model."""
    begun = RUN.fullmatch(recipe.initial or "")
    if begun and not Path(begun[0]).is_dir():
        raise TrainingError(f"{begun[0]}: no such model folder; train `{begun[1]}` first, or --set initial=FOLDER")


def check_shape(initial: str, found: NviumConfig, expected: NviumConfig) -> None:
    """Refuse a model that is not the recipe's."""
    wrong = [
        f"{name} {getattr(found, name)}, not {getattr(expected, name)}"
        for name in SHAPE
        if getattr(found, name) != getattr(expected, name)
    ]
    if wrong:
        raise TrainingError(f"{initial}: has {'; '.join(wrong)} as the recipe's shape")
    if found.max_position_embeddings < expected.max_position_embeddings:
        raise TrainingError(f"{initial}: its context is {found.max_position_embeddings} tokens, the recipe's is longer")


def given_tokenizer(recipe: Recipe) -> PreTrainedTokenizerBase | None:
    """The tokenizer that a recipe names, or that of its initial model; None where one is to be trained.

    For conversations it has a chat template. Raises `CheckpointError` for a folder that is not there and
    `TrainingError` naming that of a tokenizer which cannot be used.
    """
    source = recipe.tokenizer or recipe.initial
    if source is None:
        return None
    folder = resolve_folder(source)
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        if recipe.text == "conversations":
            give_chat_template(tokenizer)
    except Exception as error:  # whatever transformers and tokenizers make of damaged files
        raise TrainingError(f"{source}: no usable tokenizer ({error})") from error
    return tokenizer
