"""From files to packed conversations; a run on them starts from a model, resumes exactly and learns to answer."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from nvium_core import NviumForCausalLM
from nvium_core.training.chat.chat_data import chat_examples, prepare_conversations, validation_conversations
from nvium_core.training.chat.conversations import assistant, user
from nvium_core.training.chat.template import give_chat_template
from nvium_core.training.data.documents import END_OF_TEXT, DataError
from nvium_core.training.data.tokenizer import save_tokenizer, train_tokenizer
from nvium_core.training.errors import TrainingError
from nvium_core.training.options import RunOptions
from nvium_core.training.recipes.recipe import Recipe
from nvium_core.training.train import TrainingRun
from tests.training.small_runs import WORDS, options, small_recipe, start

CONTEXT = 64


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = train_tokenizer([" ".join(WORDS)] * 20, 280, context=CONTEXT)
    give_chat_template(tokenizer)
    return tokenizer


def chat_file(path: Path, *answers: str) -> Path:
    lines = [json.dumps({"messages": [user(f"{answer.split()[0]}?"), assistant(answer)]}) for answer in answers]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_what_exceeds_the_context_is_cut_and_told(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = chat_file(tmp_path / "chat.jsonl", "the cat ran", "the cat " * 100)
    whole, cut = chat_examples(path, tokenizer, CONTEXT)
    assert (whole.tokens[-1], len(cut)) == (tokenizer.eos_token_id, CONTEXT)
    assert cut.is_answer[-1] and cut.tokens[-1] != tokenizer.eos_token_id
    told = " ".join(capsys.readouterr().err.split())
    assert "1 of 2 conversations exceed the context and are cut, 0 left out" in told
    with pytest.raises(DataError, match=r"chat\.jsonl: no conversation has an answer within a context of 4 tokens"):
        chat_examples(path, tokenizer, 4)


def test_all_tokens_may_count_and_no_conversation_is_left_out(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    path = chat_file(tmp_path / "chat.jsonl", "the cat ran", "a dog sat")
    short, beginning = 4, slice(None, 4)
    whole = chat_examples(path, tokenizer, CONTEXT)
    cut = chat_examples(path, tokenizer, short, answers_only=False)
    assert [each.tokens.tolist() for each in cut] == [each.tokens[beginning].tolist() for each in whole]


def test_a_line_that_cannot_be_used_is_named(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    path = chat_file(tmp_path / "chat.jsonl", "the cat ran", f"a dog {END_OF_TEXT} sat")
    with pytest.raises(DataError, match=r"chat\.jsonl, line 2: .*special token"):
        chat_examples(path, tokenizer, CONTEXT)


@pytest.fixture
def recipe(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> Recipe:
    """A recipe that starts from a small model and its tokenizer, without template."""
    own = small_recipe("short_context=64", "router_warmup.share=0", "total_tokens=6144", "learning_rate.maximum=0.02")
    torch.manual_seed(1)
    NviumForCausalLM(own.shape.config(280, tokenizer.eos_token_id)).save_pretrained(tmp_path / "base")
    tokenizer.chat_template = None
    save_tokenizer(tokenizer, tmp_path / "base")
    return replace(own, text="conversations", initial=str(tmp_path / "base"))


ANSWERS = [f"{one} {other}" for one in WORDS for other in ("cat ran", "dog sat", "fox ate")]


def begun(recipe: Recipe, folder: Path, data: Path) -> TrainingRun:
    folder.mkdir(exist_ok=True)
    tokenizer, stream = prepare_conversations(recipe, data, folder)
    run = TrainingRun(recipe, RunOptions(data=data, folder=folder), tokenizer, stream)
    run.resume()
    return run


def weights(run: TrainingRun) -> dict[str, torch.Tensor]:
    for _ in run.steps():
        pass
    return run.model.state_dict()


def test_an_interrupted_tuning_ends_with_exactly_the_weights_of_an_uninterrupted_one(
    recipe: Recipe, tmp_path: Path
) -> None:
    data = chat_file(tmp_path / "chat.jsonl", *ANSWERS)
    whole = weights(begun(recipe, tmp_path / "whole", data))
    interrupted = begun(recipe, tmp_path / "run", data)
    steps = interrupted.steps()
    for _ in range(6):
        next(steps)
    steps.close()
    torch.manual_seed(99)
    resumed = begun(recipe, tmp_path / "run", data)
    assert resumed.step == 4
    assert all(torch.equal(tensor, whole[name]) for name, tensor in weights(resumed).items())


def test_examples_are_made_once_and_not_taken_for_others(recipe: Recipe, tmp_path: Path) -> None:
    data = chat_file(tmp_path / "chat.jsonl", *ANSWERS)
    _, first = prepare_conversations(recipe, data, tmp_path)
    written = (tmp_path / "examples.npz").stat().st_mtime_ns
    _, second = prepare_conversations(recipe, data, tmp_path)
    assert (tmp_path / "examples.npz").stat().st_mtime_ns == written
    assert all(np.array_equal(a.tokens, b.tokens) for a, b in zip(first.examples, second.examples, strict=True))
    chat_file(data, "the cat ran")
    with pytest.raises(TrainingError, match="data"):
        prepare_conversations(recipe, data, tmp_path)


def test_conversations_need_a_tokenizer(recipe: Recipe, tmp_path: Path) -> None:
    data = chat_file(tmp_path / "chat.jsonl", *ANSWERS)
    with pytest.raises(TrainingError, match="set initial or tokenizer"):
        prepare_conversations(replace(recipe, initial=None), data, tmp_path)


def test_validation_takes_the_first_conversations_that_fit(
    recipe: Recipe, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    give_chat_template(tokenizer)
    data = chat_file(tmp_path / "chat.jsonl", *ANSWERS)
    few = validation_conversations(replace(recipe, validation_tokens=60), data, tokenizer).examples
    assert 1 < len(few) < len(ANSWERS) and sum(map(len, few)) <= 60
    assert len(validation_conversations(replace(recipe, validation_tokens=1), data, tokenizer).examples) == 1


def test_epochs_are_of_the_conversations_that_there_are(
    recipe: Recipe, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """One to a window, as many steps as two readings of ten conversations take, each of them read twice."""
    two = replace(recipe, epochs=2.0, packing=False, tokens_per_step=4 * 64)
    data = chat_file(tmp_path / "chat.jsonl", *(f"{word} ran" for word in WORDS[:10]))
    run = start(two, replace(options(tmp_path / "run"), data=data))
    assert (run.recipe.num_steps, run.epochs) == (5, 2.0)
    firsts = Counter(
        tuple(window.tolist()) for step in range(5) for batch in run.batches_of(step) for window in batch.inputs
    )
    assert len(firsts) == 10 and set(firsts.values()) == {2}
