from io import StringIO

import pytest
from rich.console import Console

from nvium_core import LoadedModel
from nvium_core.bench.figures import Figures
from nvium_core.evaluation import suite
from nvium_core.evaluation.perplexity import EvaluationError
from nvium_core.evaluation.suite import report
from nvium_core.loading import load_model
from nvium_core.training.run_folder import write_model
from research.paper import pareto
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
