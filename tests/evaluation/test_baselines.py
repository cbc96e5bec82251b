"""From folders of CALM* and LayerSkip to points of the quality-speed figure, on models of bytes."""

import json
from pathlib import Path

import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from nvium_core import CheckpointError, LoadedModel, load_model
from nvium_core.bench.harness import Figures
from nvium_core.evaluation import comparison, suite
from nvium_core.evaluation.baselines import CALM, LAYERSKIP, evaluate_baseline, load_baseline
from nvium_core.evaluation.calm import evaluate_calm
from nvium_core.evaluation.paper import PARETO
from nvium_core.evaluation.perplexity import evaluate
from nvium_core.evaluation.predictions import EvaluationError
from nvium_core.training.baselines.calm import CalmForCausalLM
from tests.byte_model import END_OF_TEXT, byte_tokenizer
from tests.random_models import random_model
from tests.training.baselines.small_models import small_calm, small_univium

DOCUMENTS = ["A fox met two hens.", "The hens went home, and nobody saw them again."]
PROMPTS = {"qa": ["Who went home?"], "long": ["Once upon a time " * 9]}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer(), eos_token=END_OF_TEXT)


def saved(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> str:
    model.float().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def folders(tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    models: dict[str, PreTrainedModel] = {
        "calm": small_calm(vocab_size=257),
        "layerskip": small_univium(num_layers=5, vocab_size=257),
        "dense": small_univium(num_layers=6, seed=1, vocab_size=257),
        "shallow": small_univium(num_layers=2, vocab_size=257),
        "nvium": random_model([1, 2], vocab_size=257),
    }
    folder = tmp_path_factory.mktemp("folders")
    return {name: saved(model, tokenizer, folder / name) for name, model in models.items()}


@pytest.fixture(scope="module")
def twin(folders: dict[str, str]) -> LoadedModel:
    return load_model(folders["dense"], "cpu")


def points_of(folder: str, twin: LoadedModel) -> list[Figures]:
    loaded = load_baseline(folder, "cpu")
    return evaluate_baseline(loaded, twin, DOCUMENTS, PROMPTS, trials=1, show_progress=False)


@pytest.fixture(scope="module")
def calm(folders: dict[str, str], twin: LoadedModel) -> list[Figures]:
    return points_of(folders["calm"], twin)


@pytest.fixture(scope="module")
def layerskip(folders: dict[str, str], twin: LoadedModel) -> list[Figures]:
    return points_of(folders["layerskip"], twin)


def test_calm_has_a_point_for_each_threshold_with_the_quality_it_has_there(
    calm: list[Figures], folders: dict[str, str], twin: LoadedModel
) -> None:
    assert [point["model"] for point in calm] == [f"CALM* τ {threshold}" for threshold in (0.9, 0.8, 0.7, 0.6)]
    loaded, last = load_baseline(folders["calm"], "cpu"), calm[-1]
    assert isinstance(loaded.model, CalmForCausalLM)
    expected = evaluate_calm(loaded.model, loaded.tokenizer, DOCUMENTS, 0.6)
    dense = evaluate(twin.model, twin.tokenizer, DOCUMENTS).perplexity
    assert last["perplexity"] == expected.perplexity and last["exit_shares"] == expected.exit_shares
    assert last["perplexity_gain_percent"] == pytest.approx(100 * (dense - expected.perplexity) / dense)
    assert last["theoretical_speed_up_percent"] == pytest.approx(100 / expected.mean_depth - 100)
    assert last["mean_depth"] < calm[0]["mean_depth"]
    assert 0 < last["early_share"] < 1


def test_layerskip_has_a_point_for_each_draft_it_can_make_and_one_quality(
    layerskip: list[Figures], folders: dict[str, str]
) -> None:
    assert [point["model"] for point in layerskip] == [
        f"LayerSkip {draft}" for draft in ("4, 12", "4, 8", "2, 5", "2, 8")
    ]
    loaded = load_baseline(folders["layerskip"], "cpu")
    assert {point["perplexity"] for point in layerskip} == {
        evaluate(loaded.model, loaded.tokenizer, DOCUMENTS).perplexity
    }
    assert all(0 < point["early_share"] < 1 for point in layerskip)
    assert "mean_depth" not in layerskip[0]


def test_every_point_says_how_it_was_measured(calm: list[Figures], layerskip: list[Figures]) -> None:
    for point in (*calm, *layerskip):
        assert point["prompts"] == {"qa": 1, "long": 1}
        assert (point["prompts_cut"], point["max_new_tokens"], point["trials"]) == (1, 32, 1)
        assert all(time > 0 for of_category in point["milliseconds"].values() for time in of_category.values())
        assert point["twin"]["model"] == "dense"
    assert [point["folder"] for point in (calm[0], layerskip[0])] == ["calm", "layerskip"]


def test_points_are_tabulated_and_drawn_by_family_from_their_files(
    calm: list[Figures], layerskip: list[Figures], tmp_path: Path
) -> None:
    paths = [tmp_path / "calm.json", tmp_path / "layerskip.json"]
    for path, points in zip(paths, (calm, layerskip), strict=True):
        suite.write_json(points, path)
        json.loads(path.read_text(), parse_constant=pytest.fail)
    found = comparison.read_evaluations(paths)
    assert {family: len(points) for family, points in comparison.points(found).items()} == {"CALM*": 4, "LayerSkip": 4}
    assert comparison.markdown(found).count("| LayerSkip ") == 4
    comparison.draw(found, tmp_path / "pareto.png")
    assert (tmp_path / "pareto.png").exists()


def test_a_folder_of_another_kind_is_refused_by_name(folders: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(EvaluationError, match=r"nvium: neither a CALM\* nor a Llama"):
        load_baseline(folders["nvium"], "cpu")
    with pytest.raises(CheckpointError, match=tmp_path.name):
        load_baseline(str(tmp_path), "cpu")
    with pytest.raises(CheckpointError, match="no-such-folder"):
        load_baseline("no-such-folder", "cpu")


def test_a_twin_that_cannot_be_compared_is_refused(
    folders: dict[str, str], twin: LoadedModel, tokenizer: PreTrainedTokenizerFast
) -> None:
    loaded = load_baseline(folders["calm"], "cpu")
    with pytest.raises(EvaluationError, match="nvium has early exits"):
        evaluate_baseline(loaded, load_model(folders["nvium"], "cpu"), DOCUMENTS, PROMPTS)
    other = LoadedModel("other", twin.model, PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer()))
    other.tokenizer.add_tokens(["fox"])
    with pytest.raises(EvaluationError, match="other has another tokenizer"):
        evaluate_baseline(loaded, other, DOCUMENTS, PROMPTS)


def test_a_model_too_shallow_to_draft_is_refused(folders: dict[str, str], twin: LoadedModel) -> None:
    with pytest.raises(EvaluationError, match="2 layers are too few"):
        evaluate_baseline(load_baseline(folders["shallow"], "cpu"), twin, DOCUMENTS, PROMPTS)


def test_names_are_those_of_the_papers_figure() -> None:
    assert {CALM, LAYERSKIP} <= PARETO.keys()
