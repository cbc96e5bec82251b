"""The model that a run starts from, random or trained, and its tokenizer."""

from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from nvium_core.errors import TrainingError
from nvium_core.model.causal_lm import NviumForCausalLM
from nvium_core.model.checkpoint import read_config, resolve_folder
from nvium_core.model.config import NviumConfig
from nvium_core.text.chat_template import CHAT_TEMPLATE
from nvium_core.text.folder_tokenizer import folder_tokenizer
from nvium_core.training.recipes.recipe import CONFIG_FIELDS, RUN, ModelShape, Recipe, RecipeError


def with_initial_shape(recipe: Recipe) -> Recipe:
    """Return the recipe with the shape of its initial model. The context is at most the recipe's and the model's.

    Raise `TrainingError` if `initial` is the model of another recipe that has not been trained yet, and
    `CheckpointError` if the model cannot be read.
    """
    if recipe.initial is None:
        return recipe
    other_run = RUN.fullmatch(recipe.initial)
    if other_run and not Path(other_run[0]).is_dir():
        raise TrainingError(
            f"{other_run[0]}: no such model folder; train `{other_run[1]}` first, or pass --set initial=FOLDER"
        )
    config = read_config(resolve_folder(recipe.initial))
    check_head(recipe.initial, config)
    context = min(recipe.shape.context, config.max_position_embeddings)
    try:
        return replace(recipe, shape=shape_of(config, context))
    except ValueError as error:
        raise RecipeError(f"{recipe.initial}: {error}") from error


def check_head(source: str, config: NviumConfig) -> None:
    """Raise `TrainingError` if the logits have a cap, which the losses do not compute."""
    if config.logit_cap is not None:
        raise TrainingError(f"{source}: limits its logits (final_logit_softcapping), so it cannot be trained")


def shape_of(config: NviumConfig, context: int) -> ModelShape:
    same = {ours: getattr(config, theirs) for ours, theirs in CONFIG_FIELDS.items()} | {"context": context}
    exits = tuple(config.exit_layers or ())
    return ModelShape(num_exits=config.num_exits, exit_layers=exits, vocab_size=config.vocab_size, **same)


def imported(name: str) -> Any:
    """Import `package.module.NAME`. Raise `TrainingError` if there is no such class or function."""
    try:
        found = resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise TrainingError(f"{name}: cannot be imported ({error}); expected package.module.NAME") from error
    if not callable(found):
        raise TrainingError(f"{name}: must name a class or function")
    return found


def built_model(recipe: Recipe, vocab_size: int, end_token: int) -> NviumForCausalLM:
    build = imported(recipe.model) if recipe.model else initial_model
    model: NviumForCausalLM = build(recipe, vocab_size, end_token)
    return model


def initial_model(recipe: Recipe, vocab_size: int, end_token: int) -> NviumForCausalLM:
    """Load `initial` in float32, or build a model with random weights.

    Raise `CheckpointError` or `TrainingError` if `initial` cannot be used.
    """
    if recipe.initial is None:
        return NviumForCausalLM(recipe.shape.config(vocab_size, end_token))
    model = NviumForCausalLM.from_pretrained(recipe.initial, dtype=torch.float32)
    if vocab_size > model.config.vocab_size:
        raise TrainingError(
            f"{recipe.initial}: the vocabulary has {model.config.vocab_size} tokens, fewer than the tokenizer's "
            f"{vocab_size}; choose another tokenizer with --set tokenizer=NAME"
        )
    return model


def given_tokenizer(recipe: Recipe) -> PreTrainedTokenizerBase | None:
    """Load the recipe's tokenizer or that of its initial model. Return None if a tokenizer must be trained.

    If the recipe trains on conversations, a tokenizer without a chat template gets the default one. Raise
    `CheckpointError` if the tokenizer cannot be loaded.
    """
    source = recipe.tokenizer or recipe.initial
    if source is None:
        return None
    tokenizer = folder_tokenizer(resolve_folder(source))
    if recipe.text == "conversations":
        give_chat_template(tokenizer)
    return tokenizer


def give_chat_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Set the default chat template if the tokenizer has none.

    The default template requires that begin-of-text and end-of-text are the same token. Raise `TrainingError` if not.
    """
    if tokenizer.chat_template:
        return
    if tokenizer.bos_token is None or tokenizer.bos_token != tokenizer.eos_token:
        raise TrainingError(
            f"{tokenizer.name_or_path}: the tokenizer has no chat template, and the default template requires that "
            "bos_token equals eos_token"
        )
    tokenizer.chat_template = CHAT_TEMPLATE
