from pathlib import Path

import pytest
from transformers import PreTrainedModel

from nvium_core import load_model
from nvium_core.evaluation.perplexity import evaluate
from research.baselines.__main__ import evaluate_baseline
from research.baselines.calm import CalmForCausalLM
from research.baselines.confidence import evaluate_calm
from tests.byte_model import wrapped_tokenizer
from tests.research.baselines.small_models import small_calm, small_univium

DOCUMENTS = ["A fox met two hens.", "The hens went home, and nobody saw them again."]
PROMPTS = {"qa": ["Who went home?"], "long": ["Once upon a time " * 9]}


def saved(model: PreTrainedModel, folder: Path) -> str:
    model.float().save_pretrained(folder)
    wrapped_tokenizer().save_pretrained(folder)
    return str(folder)


def test_calm_has_a_point_with_its_own_loss_for_each_threshold(tmp_path):
    model = small_calm(vocab_size=257)
    model.lm_head.weight.data *= 2  # then answers leave early too
    loaded = load_model(saved(model, tmp_path / "calm"), "cpu", kind=CalmForCausalLM)
    twin = load_model(saved(small_univium(num_layers=6, seed=1, vocab_size=257), tmp_path / "dense"), "cpu")
    calm = evaluate_baseline(loaded, twin, DOCUMENTS, PROMPTS, trials=1)
    assert [point["model"] for point in calm] == [f"CALM* τ {threshold}" for threshold in (0.9, 0.8, 0.7, 0.6)]
    last, (expected,) = calm[-1], evaluate_calm(loaded.model, loaded.tokenizer, DOCUMENTS, [0.6])
    assert last.items() >= expected.items()
    dense, perplexity = evaluate(twin.model, twin.tokenizer, DOCUMENTS)["perplexity"], expected["perplexity"]
    assert last["perplexity_gain_percent"] == pytest.approx(100 * (dense - perplexity) / dense)
    assert last["mean_depth"] < calm[0]["mean_depth"]
    early, late = ([step["tokens"] for step in point["latency"]["staircase"]] for point in (last, calm[0]))
    num_tokens = 2 * (last["latency"]["max_new_tokens"] - 1)
    assert sum(early) == sum(late) == num_tokens and early[-1] < late[-1] < num_tokens
