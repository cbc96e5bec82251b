from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from nvium_core import NviumForCausalLM
from nvium_core.model.checkpoint import CheckpointError
from nvium_core.training.data.documents import END_OF_TEXT
from nvium_core.training.data.encoding import encode
from nvium_core.training.data.tokenizer import save_tokenizer, train_tokenizer
from nvium_core.training.data.tokens import prepare_documents
from nvium_core.training.errors import TrainingError
from nvium_core.training.initial import given_tokenizer, initial_model
from nvium_core.training.recipes.recipe import Recipe
from tests.model.llama_folders import llama_folder, random_llama
from tests.training.small_runs import WORDS, small_corpus, small_recipe

VOCAB_SIZE = 280


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    recipe = small_recipe()
    NviumForCausalLM(recipe.shape.config(VOCAB_SIZE, 0)).to(torch.bfloat16).save_pretrained(tmp_path)
    return replace(recipe, initial=str(tmp_path))


def test_without_another_model_weights_are_random(recipe: Recipe) -> None:
    models = [initial_model(replace(recipe, initial=None), VOCAB_SIZE, 0) for _ in range(2)]
    assert not torch.equal(models[0].lm_head.weight, models[1].lm_head.weight)


def test_a_model_is_taken_over_in_single_precision(recipe: Recipe) -> None:
    assert recipe.initial
    model, stored = initial_model(recipe, VOCAB_SIZE, 0), NviumForCausalLM.from_pretrained(recipe.initial)
    assert model.dtype == torch.float32
    assert torch.equal(model.lm_head.weight, stored.lm_head.weight.float())


@pytest.mark.parametrize(
    ("setting", "complaint"),
    [
        ("shape.num_exits=1", r"exit_layers \[1, 2\], not \[2\]"),
        ("shape.mlp_width=56", "intermediate_size 48, not 56"),
        ("shape.context=128", "context is 64 tokens"),
    ],
)
def test_a_model_of_another_shape_is_refused(setting: str, complaint: str, recipe: Recipe) -> None:
    other = replace(small_recipe(setting), initial=recipe.initial)
    with pytest.raises(TrainingError, match=complaint):
        initial_model(other, VOCAB_SIZE, 0)


def test_a_context_may_be_shorter_than_the_models(recipe: Recipe) -> None:
    shorter = replace(small_recipe("shape.context=32"), initial=recipe.initial)
    kept = initial_model(recipe, VOCAB_SIZE, 0).config.max_position_embeddings
    assert initial_model(shorter, VOCAB_SIZE, 0).config.max_position_embeddings == kept > shorter.shape.context


def test_a_retrofit_starts_from_a_llama(tmp_path: Path) -> None:
    llama = random_llama(hidden_size=32, intermediate_size=48, num_hidden_layers=2, vocab_size=VOCAB_SIZE)
    recipe = small_recipe(f"initial={llama_folder(tmp_path, llama)}", "method=retrofit", "shape.num_kv_heads=2")
    recipe = replace(recipe, shape=replace(recipe.shape, num_heads=4))
    model = initial_model(recipe, VOCAB_SIZE, 0)
    assert model.config.exit_layers == [1, 2]
    assert torch.equal(model.lm_head.weight, llama.lm_head.weight)


def test_a_folder_that_is_not_there_is_refused_by_name(recipe: Recipe) -> None:
    missing = replace(recipe, initial="/nowhere/model")
    with pytest.raises(CheckpointError, match="/nowhere/model"):
        initial_model(missing, VOCAB_SIZE, 0)
    with pytest.raises(CheckpointError, match="/nowhere/model"):
        given_tokenizer(missing)


def test_the_tokenizer_is_the_named_one_or_the_initial_models_or_none(recipe: Recipe, tmp_path: Path) -> None:
    save_tokenizer(train_tokenizer([" ".join(WORDS)] * 20, VOCAB_SIZE, context=64), tmp_path)
    save_tokenizer(train_tokenizer([" ".join(WORDS)] * 20, 270, context=64), tmp_path / "other")
    assert given_tokenizer(small_recipe()) is None
    own, named = given_tokenizer(recipe), given_tokenizer(replace(recipe, tokenizer=str(tmp_path / "other")))
    assert own and named and (len(own), len(named)) == (VOCAB_SIZE, 270)
    assert own.chat_template is None
    chatty = given_tokenizer(replace(recipe, text="conversations"))
    assert chatty and chatty.chat_template


def test_a_damaged_tokenizer_is_refused_by_folder(recipe: Recipe, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{", encoding="utf-8")
    with pytest.raises(TrainingError, match=tmp_path.name):
        given_tokenizer(recipe)


def test_text_is_read_by_the_initial_models_tokenizer(recipe: Recipe, tmp_path: Path) -> None:
    save_tokenizer(train_tokenizer(["something else entirely"], VOCAB_SIZE, context=64), tmp_path)
    (tmp_path / "run").mkdir()
    tokenizer, stream = prepare_documents(recipe, small_corpus(tmp_path / "corpus.txt"), tmp_path / "run")
    expected = given_tokenizer(recipe)
    assert expected and tokenizer.get_vocab() == expected.get_vocab()
    assert stream.tokens.max() < VOCAB_SIZE
    with pytest.raises(TrainingError, match="tokenizer"):
        prepare_documents(small_recipe(), tmp_path / "corpus.txt", tmp_path / "run")


@pytest.mark.parametrize(("size", "bits"), [(300, 16), (2**16 + 1, 32)])
def test_tokens_take_as_many_bits_as_the_vocabulary_needs(size: int, bits: int) -> None:
    words = [f"w{number}" for number in range(size)]
    vocabulary = {word: number for number, word in enumerate([*words[:-1], END_OF_TEXT])}
    wide = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    wide.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=wide, eos_token=END_OF_TEXT)
    stream = encode([f"w1 {words[-2]}"], tokenizer)
    assert stream.tolist() == [size - 1, 1, size - 2, size - 1]
    assert stream.dtype.itemsize * 8 == bits
