from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nvium_core import NviumForCausalLM
from nvium_core.errors import CheckpointError, TrainingError
from nvium_core.training.data.source import prepare_text, train_tokenizer
from nvium_core.training.initial import given_tokenizer, initial_model, with_initial_shape
from nvium_core.training.recipes.catalogue import recipe_named
from nvium_core.training.recipes.recipe import Recipe
from nvium_core.training.run_folder import save_tokenizer
from tests.training.small_runs import WORDS, small_corpus, small_recipe

VOCAB_SIZE = 280


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    recipe = small_recipe()
    NviumForCausalLM(recipe.shape.config(VOCAB_SIZE, 0)).to(torch.bfloat16).save_pretrained(tmp_path)
    return replace(recipe, initial=str(tmp_path))


def test_a_recipe_adopts_the_shape_of_its_initial_model_and_the_shorter_context(recipe):
    other = replace(small_recipe("shape.width=64", "shape.num_exits=1", "shape.context=128"), initial=recipe.initial)
    shape = with_initial_shape(other).shape
    assert (shape.width, shape.exit_depths, shape.context) == (32, [1, 2], 64)
    assert with_initial_shape(replace(small_recipe("shape.context=32"), initial=recipe.initial)).shape.context == 32
    assert with_initial_shape(small_recipe()) == small_recipe()
    chat = with_initial_shape(recipe_named("stories-chat", [f"initial={recipe.initial}"]))
    assert (chat.shape.width, chat.shape.context) == (32, 64)


def test_a_tokenizer_larger_than_the_models_vocabulary_is_refused(recipe):
    with pytest.raises(TrainingError, match="has 280 tokens, fewer than the tokenizer's 281"):
        initial_model(recipe, 281, 0)


def test_a_missing_folder_is_named(recipe):
    missing = replace(recipe, initial="/nowhere/model")
    with pytest.raises(CheckpointError, match="/nowhere/model"):
        initial_model(missing, VOCAB_SIZE, 0)
    with pytest.raises(CheckpointError, match="/nowhere/model"):
        given_tokenizer(missing)


def test_the_tokenizer_is_the_recipes_or_the_initial_models_or_none(recipe, tmp_path):
    save_tokenizer(train_tokenizer([" ".join(WORDS)] * 20, VOCAB_SIZE, context=64), tmp_path)
    save_tokenizer(train_tokenizer([" ".join(WORDS)] * 20, 270, context=64), tmp_path / "other")
    assert given_tokenizer(small_recipe()) is None
    own, named = given_tokenizer(recipe), given_tokenizer(replace(recipe, tokenizer=str(tmp_path / "other")))
    assert own and named and (len(own), len(named)) == (VOCAB_SIZE, 270)
    assert own.chat_template is None
    chatty = given_tokenizer(replace(recipe, text="conversations"))
    assert chatty and chatty.chat_template


def test_text_is_tokenized_by_the_initial_models_tokenizer(recipe, tmp_path):
    save_tokenizer(train_tokenizer(["something else entirely"], VOCAB_SIZE, context=64), tmp_path)
    (tmp_path / "run").mkdir()
    tokenizer, stream = prepare_text(recipe, small_corpus(tmp_path / "corpus.txt"), tmp_path / "run")
    expected = given_tokenizer(recipe)
    assert expected and tokenizer.get_vocab() == expected.get_vocab()
    assert stream.tokens[0 : len(stream.tokens)].max() < VOCAB_SIZE
    with pytest.raises(TrainingError, match="tokenizer"):
        prepare_text(small_recipe(), tmp_path / "corpus.txt", tmp_path / "run")
