"""What a run starts from: random weights or a trained model, and whose tokenizer it uses."""

from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from nvium_core.model.causal_lm import NviumForCausalLM
from nvium_core.model.checkpoint import read_config, resolve_folder
from nvium_core.training.chat.template import give_chat_template
from nvium_core.training.errors import TrainingError
from nvium_core.training.recipes.recipe import Recipe, RecipeError
from nvium_core.training.recipes.twins import RUN


def with_initial_shape(recipe: Recipe) -> Recipe:
    """Give a recipe the shape of its initial model; windows are no longer than either allows.

    Raises `TrainingError` if `initial` is the model of another recipe's run that is not there, and `CheckpointError`
    for a model that cannot be read.
    """
    if recipe.initial is None:
        return recipe
    begun = RUN.fullmatch(recipe.initial)
    if begun and not Path(begun[0]).is_dir():
        raise TrainingError(f"{begun[0]}: no such model folder; train `{begun[1]}` first, or --set initial=FOLDER")
    config = read_config(resolve_folder(recipe.initial))
    context = min(recipe.shape.context, config.max_position_embeddings)
    shape = replace(
        recipe.shape,
        num_layers=config.num_hidden_layers,
        width=config.hidden_size,
        mlp_width=config.intermediate_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        num_exits=config.num_exits,
        exit_layers=tuple(config.exit_layers or ()),
        vocab_size=config.vocab_size,
        context=context,
        router_width=config.router_hidden_size,
        adapter_width=config.adapter_hidden_size,
        tied_head=config.tie_word_embeddings,
    )
    adopted = replace(recipe, shape=shape, short_context=min(recipe.short_context, context))
    try:
        adopted.check_together()
    except ValueError as error:
        raise RecipeError(f"{recipe.initial}: {error}") from error
    return adopted


def initial_model(recipe: Recipe, vocab_size: int, end_token: int) -> NviumForCausalLM:
    """The model of a recipe before its first step, in float32.

    Raises `CheckpointError` for an `initial` that cannot be read, and `TrainingError` for one whose vocabulary is
    smaller than the tokenizer's.
    """
    if recipe.initial is None:
        return NviumForCausalLM(recipe.shape.config(vocab_size, end_token))
    model = NviumForCausalLM.from_pretrained(recipe.initial, dtype=torch.float32)
    if vocab_size > model.config.vocab_size:
        raise TrainingError(
            f"{recipe.initial}: has {model.config.vocab_size} tokens, and the tokenizer {vocab_size}; set another"
        )
    return model


def given_tokenizer(recipe: Recipe) -> PreTrainedTokenizerBase | None:
    """The tokenizer that a recipe names, or that of its initial model; None where one is to be trained.

    For conversations it has a chat template. Raises `CheckpointError` for a missing folder and `TrainingError` for a
    tokenizer that cannot be used.
    """
    source = recipe.tokenizer or recipe.initial
    if source is None:
        return None
    folder = resolve_folder(source)
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        if recipe.text == "conversations":
            give_chat_template(tokenizer)
    except Exception as error:  # damaged files make transformers and tokenizers raise anything
        raise TrainingError(f"{source}: no usable tokenizer ({error})") from error
    return tokenizer
