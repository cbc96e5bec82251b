import math
from io import StringIO
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from nvium_core import LoadedModel
from nvium_core.bench.figures import Figures
from nvium_core.evaluation import suite
from nvium_core.evaluation.perplexity import EvaluationError
from nvium_core.evaluation.suite import perplexity_gain, report
from nvium_core.loading import load_model
from nvium_core.training.run_folder import write_model
from research.paper import pareto
from research.speed.per_token import ratio_interval
from tests.byte_model import load_byte_model
from tests.random_models import random_model

DOCUMENTS = ["A fox met two hens.", "The hens went home. " * 6, "Nobody saw them again. " * 6]


def shown(figures: Figures) -> str:
    console = Console(width=80, record=True, file=StringIO())
    console.print(report(figures))
    return console.export_text()


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_byte_model(context=64)


@pytest.fixture(scope="module")
def figures(loaded: LoadedModel) -> Figures:
    twin = LoadedModel("dense", random_model([4], vocab_size=257, context=64), loaded.tokenizer)
    return suite.evaluate(loaded, DOCUMENTS[:2], twin=twin)


def test_derived_figures_follow_from_the_measured_ones(figures):
    gain = 1 - figures["perplexity"] / figures["twin"]["perplexity"]
    assert figures["perplexity_gain_percent"] == pytest.approx(100 * gain)


def test_the_first_line_has_the_main_figures_and_the_table_fits_a_narrow_screen(figures):
    first, *rest = shown(figures).splitlines()
    assert first.startswith(f"{figures['model']}: perplexity {figures['perplexity']:.4g}, ")
    assert first.endswith(f"mean depth {figures['mean_depth']:.3f}")
    assert any(line.split()[:3] == ["dense", "twin,", "dense"] for line in rest)
    assert "of 2 documents, too few for intervals" in " ".join(rest)
    assert max(map(len, rest)) <= 80


def test_a_twin_that_cannot_be_compared_is_rejected(loaded):
    other = LoadedModel("other", random_model([4], vocab_size=257), load_byte_model().tokenizer)
    other.tokenizer.add_tokens(["fox"])
    with pytest.raises(EvaluationError, match="another tokenizer"):
        suite.evaluate(loaded, [], twin=other)
    with pytest.raises(EvaluationError, match="--twin: bytes is not a dense model"):
        suite.evaluate(loaded, [], twin=loaded)


def test_a_model_in_the_folder_of_a_run_has_its_name(loaded, tmp_path):
    for folder, name in ((tmp_path / "a-run/model", "a-run"), (tmp_path / "elsewhere", "elsewhere")):
        folder.parent.mkdir(exist_ok=True)
        (tmp_path / "a-run/recipe.json").touch()
        write_model(loaded.model, loaded.tokenizer, folder)
        assert suite.description(load_model(str(folder)))["model"] == name


def test_a_comparison_of_models_that_have_read_too_little_has_a_warning_wherever_the_models_are(loaded, tmp_path):
    trained = load_byte_model(context=64)
    trained.model.config.training_tokens = 500
    write_model(trained.model, trained.tokenizer, tmp_path / "moved")
    twin = LoadedModel("dense", random_model([4], vocab_size=257, context=64), loaded.tokenizer)
    figures = suite.evaluate(load_model(str(tmp_path / "moved")), DOCUMENTS, twin=twin)
    [caveat] = figures["caveats"]
    assert caveat.startswith("moved has read") and "too few to compare" in caveat
    text = " ".join(shown(figures).split())
    assert "below the dense twin's (see the warning); mean depth" in text and f"Warning: {caveat}." in text
    assert "faster" not in text
    assert caveat in pareto.markdown([figures]) and "(see the warning)" in pareto.markdown([figures])


def test_one_document_has_no_interval(loaded):
    twin = LoadedModel("dense", random_model([4], vocab_size=257, context=64), loaded.tokenizer)
    figures = suite.evaluate(loaded, DOCUMENTS[:1], twin=twin)
    assert figures["perplexity_gain_interval_percent"] is None
    assert "of 1 document, too few for intervals" in " ".join(shown(figures).split())


RATIOS = st.dictionaries(st.text(max_size=3), st.lists(st.floats(0.1, 10), min_size=3, max_size=9), min_size=1)


@given(RATIOS)
def test_the_interval_is_within_the_pairs(ratios):
    found = ratio_interval(ratios, {category: len(of_category) for category, of_category in ratios.items()})
    rounding = 1 + 1e-12
    assert min(map(min, ratios.values())) / rounding <= found[0] <= found[1]
    assert found[1] <= max(map(max, ratios.values())) * rounding


def test_trials_of_one_prompt_have_no_interval():
    assert ratio_interval({"qa": [1.0, 1.1, 0.9, 1.2]}, {"qa": 1}) is None
    low, high = ratio_interval({"qa": [1.0, 2.0, 3.0] * 2}, {"qa": 3})
    assert low < 2 < high


def losses(*by_document: float) -> dict[str, Any]:
    """Build the figures of documents with a hundred tokens each."""
    tokens = [100] * len(by_document)
    perplexity = math.exp(sum(by_document) / sum(tokens))
    return {"perplexity": perplexity, "document_tokens": tokens, "document_losses": list(by_document)}


def test_an_equal_gain_in_every_document_has_a_narrow_interval_and_that_of_an_inconsistent_one_contains_zero():
    dense = [300.0, 900.0, 150.0, 420.0, 777.0] * 4
    found = perplexity_gain(losses(*(loss - 2 for loss in dense)), losses(*dense))
    assert found["perplexity_gain_percent"] == pytest.approx(100 * (1 - math.exp(-0.02)))
    assert found["perplexity_gain_interval_percent"] == pytest.approx([100 * (1 - math.exp(-0.02))] * 2)
    dense = [300.0] * 20
    found = perplexity_gain(losses(*(300 - lead for lead in [5, -5, 4, -4, 1] * 4)), losses(*dense))
    low, high = found["perplexity_gain_interval_percent"]
    assert low < 0 < found["perplexity_gain_percent"] < high


def test_documents_of_a_work_are_resampled_together():
    """All chapters of a work gain or lose: by chapter the gain seems certain, by work it does not."""
    works = [f"work {number // 10}" for number in range(40)]
    leads = [-3.0 if number < 10 else 3.0 for number in range(40)]
    dense, ours = losses(*[300.0] * 40), losses(*(300 - lead for lead in leads))
    low, _ = perplexity_gain(ours, dense)["perplexity_gain_interval_percent"]
    wide, _ = perplexity_gain(ours | {"document_works": works}, dense)["perplexity_gain_interval_percent"]
    assert wide < 0 < low
