import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from nvium_core import NviumForCausalLM
from nvium_core.errors import DataError, TrainingError
from nvium_core.training.data.source import chat_examples, prepare_text, validation_text
from nvium_core.training.data.texts import END_OF_TEXT, assistant, user
from nvium_core.training.initial import give_chat_template
from nvium_core.training.recipes.recipe import Recipe
from nvium_core.training.run_folder import save_tokenizer
from tests.training.small_runs import WORDS, small_recipe

CONTEXT = 64


def chat_file(path: Path, *answers: str) -> Path:
    lines = [json.dumps({"messages": [user(f"{answer.split()[0]}?"), assistant(answer)]}) for answer in answers]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_a_conversation_longer_than_the_context_is_truncated_and_reported(tokenizer, tmp_path, capsys):
    path = chat_file(tmp_path / "chat.jsonl", "the cat ran", "the cat " * 100)
    whole, cut = chat_examples(path, tokenizer, CONTEXT)
    assert (whole.tokens[-1], len(cut)) == (tokenizer.eos_token_id, CONTEXT)
    assert cut.is_answer[-1] and cut.tokens[-1] != tokenizer.eos_token_id
    printed = " ".join(capsys.readouterr().err.split())
    assert "1 of 2 conversations exceed the context of 64 tokens; 0 dropped, the others truncated" in printed
    with pytest.raises(DataError, match=r"chat\.jsonl: no conversation has an answer within a context of 4 tokens"):
        chat_examples(path, tokenizer, 4)


def test_an_invalid_line_is_named(tokenizer, tmp_path):
    path = chat_file(tmp_path / "chat.jsonl", "the cat ran", f"a dog {END_OF_TEXT} sat")
    with pytest.raises(DataError, match=r"chat\.jsonl, line 2: .*special token"):
        chat_examples(path, tokenizer, CONTEXT)


@pytest.fixture
def recipe(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> Recipe:
    """A recipe that starts from a small model whose tokenizer has no chat template."""
    own = small_recipe("router_warmup.share=0", "total_tokens=6144", "learning_rate.maximum=0.02")
    torch.manual_seed(1)
    NviumForCausalLM(own.shape.config(280, tokenizer.eos_token_id)).save_pretrained(tmp_path / "base")
    tokenizer.chat_template = None
    save_tokenizer(tokenizer, tmp_path / "base")
    return replace(own, text="conversations", initial=str(tmp_path / "base"))


ANSWERS = [f"{one} {other}" for one in WORDS for other in ("cat ran", "dog sat", "fox ate")]


def test_a_run_needs_a_tokenizer_and_does_not_resume_with_other_conversations(recipe, tmp_path):
    data = chat_file(tmp_path / "chat.jsonl", *ANSWERS)
    _, first = prepare_text(recipe, data, tmp_path)
    _, second = prepare_text(recipe, data, tmp_path)
    assert all(np.array_equal(a.tokens, b.tokens) for a, b in zip(first.examples, second.examples, strict=True))
    chat_file(data, "the cat ran")
    with pytest.raises(TrainingError, match="data"):
        prepare_text(recipe, data, tmp_path)
    with pytest.raises(TrainingError, match="pass --set initial=MODEL or tokenizer=NAME"):
        prepare_text(replace(recipe, initial=None), data, tmp_path)


def test_validation_reads_the_first_conversations_that_fit(recipe, tokenizer, tmp_path):
    give_chat_template(tokenizer)
    data = chat_file(tmp_path / "chat.jsonl", *ANSWERS)
    few = validation_text(replace(recipe, validation_tokens=60), data, tokenizer).examples
    assert 1 < len(few) < len(ANSWERS) and sum(map(len, few)) <= 60
    assert len(validation_text(replace(recipe, validation_tokens=1), data, tokenizer).examples) == 1
