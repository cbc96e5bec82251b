from pathlib import Path

import pytest
from transformers import PreTrainedModel

from nvium_core import LoadedModel, load_model
from nvium_core.bench.figures import Figures
from nvium_core.evaluation.perplexity import evaluate
from research.baselines.__main__ import evaluate_baseline, load_baseline
from research.baselines.confidence import evaluate_calm
from tests.byte_model import wrapped_tokenizer
from tests.research.baselines.small_models import small_calm, small_univium

DOCUMENTS = ["A fox met two hens.", "The hens went home, and nobody saw them again."]
PROMPTS = {"qa": ["Who went home?"], "long": ["Once upon a time " * 9]}


def saved(model: PreTrainedModel, folder: Path) -> str:
    model.float().save_pretrained(folder)
    wrapped_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    models: dict[str, PreTrainedModel] = {
        "calm": small_calm(vocab_size=257),
        "layerskip": small_univium(num_layers=5, vocab_size=257),
        "dense": small_univium(num_layers=6, seed=1, vocab_size=257),
    }
    folder = tmp_path_factory.mktemp("folders")
    return {name: saved(model, folder / name) for name, model in models.items()}


@pytest.fixture(scope="module")
def twin(folders: dict[str, str]) -> LoadedModel:
    return load_model(folders["dense"], "cpu")


def points_of(folder: str, twin: LoadedModel) -> list[Figures]:
    loaded = load_baseline(folder, "cpu")
    return evaluate_baseline(loaded, twin, DOCUMENTS, PROMPTS, trials=1, show_progress=False)


def test_calm_has_a_point_with_its_own_loss_for_each_threshold(folders, twin):
    calm = points_of(folders["calm"], twin)
    assert [point["model"] for point in calm] == [f"CALM* τ {threshold}" for threshold in (0.9, 0.8, 0.7, 0.6)]
    loaded, last = load_baseline(folders["calm"], "cpu"), calm[-1]
    expected = evaluate_calm(loaded.model, loaded.tokenizer, DOCUMENTS, 0.6)
    dense = evaluate(twin.model, twin.tokenizer, DOCUMENTS).perplexity
    assert last["perplexity"] == expected.perplexity and last["exit_shares"] == expected.exit_shares
    assert last["perplexity_gain_percent"] == pytest.approx(100 * (dense - expected.perplexity) / dense)
    assert last["theoretical_speed_up_percent"] == pytest.approx(100 / expected.mean_depth - 100)
    assert last["mean_depth"] < calm[0]["mean_depth"]
    assert 0 < last["early_share"] < 1


def test_layerskip_has_a_point_for_each_possible_draft_and_one_loss(folders, twin):
    layerskip = points_of(folders["layerskip"], twin)
    drafts = ("4, 12", "4, 8", "2, 5", "2, 8")
    assert [point["model"] for point in layerskip] == [f"LayerSkip {draft}" for draft in drafts]
    loaded = load_baseline(folders["layerskip"], "cpu")
    perplexity = evaluate(loaded.model, loaded.tokenizer, DOCUMENTS).perplexity
    assert {point["perplexity"] for point in layerskip} == {perplexity}
    assert all(0 < point["early_share"] < 1 for point in layerskip)
    assert "mean_depth" not in layerskip[0]
