from io import StringIO

import pytest
from rich.console import Console

from nvium_core import LoadedModel
from nvium_core.bench.figures import Figures
from nvium_core.evaluation import suite
from nvium_core.evaluation.predictions import EvaluationError
from nvium_core.evaluation.report import report
from nvium_core.loading import load_model
from nvium_core.model.stored import quantize_model
from nvium_core.training.recipes.catalogue import recipe_named
from nvium_core.training.run_folder import write_model, write_recipe
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
    return suite.evaluate(loaded, DOCUMENTS, twin=twin, works=["a", "a", "b"], show_progress=False)


def test_derived_figures_follow_from_the_measured_ones(figures):
    assert figures["theoretical_speed_up_percent"] == pytest.approx(100 / figures["mean_depth"] - 100)
    gain = 1 - figures["perplexity"] / figures["twin"]["perplexity"]
    assert figures["perplexity_gain_percent"] == pytest.approx(100 * gain)
    assert figures["flops"]["spoken"]["layers"] == figures["flops"]["all_exits"]["layers"]


def test_the_first_line_has_the_main_figures_and_the_table_fits_a_narrow_screen(figures):
    first, *rest = shown(figures).splitlines()
    assert first.startswith(f"{figures['model']}: perplexity {figures['perplexity']:.4g}, ")
    assert first.endswith(f"mean depth {figures['mean_depth']:.3f}")
    assert any(line.split()[:3] == ["dense", "twin,", "dense"] for line in rest)
    assert "of 2 works, which" in " ".join(rest)
    assert max(map(len, rest)) <= 80


def test_the_cost_of_quantization_is_reported(loaded):
    rounded = load_byte_model(context=64)
    quantize_model(rounded.model, "q4")
    figures = suite.evaluate(rounded, DOCUMENTS, unrounded=loaded, show_progress=False)
    exact = suite.evaluate(loaded, DOCUMENTS, show_progress=False)["perplexity"]
    found = figures["rounding"]
    assert found["unrounded_perplexity"] == exact != figures["perplexity"]
    assert found["price_percent"] == pytest.approx(100 * (figures["perplexity"] / exact - 1))
    low, high = found["price_interval_percent"]
    assert low <= found["price_percent"] <= high
    assert f"above that of the unquantized weights, {exact:.4f}" in " ".join(shown(figures).split())


def test_a_twin_that_cannot_be_compared_and_too_few_works_are_rejected(loaded):
    other = LoadedModel("other", random_model([4], vocab_size=257), load_byte_model().tokenizer)
    other.tokenizer.add_tokens(["fox"])
    with pytest.raises(EvaluationError, match="another tokenizer"):
        suite.evaluate(loaded, [], twin=other, show_progress=False)
    with pytest.raises(EvaluationError, match="--twin: bytes is not a dense model"):
        suite.evaluate(loaded, [], twin=loaded, show_progress=False)
    with pytest.raises(EvaluationError, match="2 lines, but the text has 3 documents"):
        suite.evaluate(loaded, DOCUMENTS, works=["a", "b"], show_progress=False)


def test_a_model_in_the_folder_of_a_run_has_its_name_and_training_tokens(loaded, tmp_path):
    first, left, moved = (tmp_path / name for name in ("first/model", "a-run/model", "elsewhere"))
    for folder in (first, left, moved):
        write_model(loaded.model, loaded.tokenizer, folder)
        initial = [] if folder == first else [f"initial={first}"]
        recipe = recipe_named("tiny", initial)
        write_recipe(recipe, folder.parent)
    found = suite.description(load_model(str(left)))
    assert (found["model"], found["training_tokens"]) == ("a-run", 2 * recipe.total_tokens)
    found = suite.description(load_model(str(moved)))
    assert (found["model"], found["training_tokens"]) == ("elsewhere", None)
