"""`nvium evaluate` as a whole, on a random model of bytes: figures, report, files."""

import json
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from nvium_core import LoadedModel
from nvium_core.bench.harness import Figures
from nvium_core.evaluation import suite
from nvium_core.evaluation.predictions import EvaluationError
from nvium_core.evaluation.report import markdown, papers_routing
from nvium_core.loading import load_model, quantize_as
from nvium_core.training.recipes.catalogue import recipe_named
from nvium_core.training.run_folder import recipe_of, write_model, write_recipe
from tests.byte_model import EXIT_LAYERS, load_byte_model
from tests.random_models import random_model

DOCUMENTS = ["A fox met two hens.", "The hens went home. " * 6, "Nobody saw them again. " * 6]


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_byte_model(context=64)


@pytest.fixture(scope="module")
def twin(loaded: LoadedModel) -> LoadedModel:
    return LoadedModel("dense", random_model([4], vocab_size=257, context=64), loaded.tokenizer)


@pytest.fixture(scope="module")
def spec_bench(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("spec_bench") / "question.jsonl"
    path.write_text('{"category": "qa", "turns": ["Who went home?"]}\n')
    return path


@pytest.fixture(scope="module")
def figures(loaded: LoadedModel, twin: LoadedModel, spec_bench: Path) -> Figures:
    """Everything but tasks, at the smallest size."""
    sizes = {"num_texts": 2, "tokens_per_text": 8}
    parts = suite.Parts(greedy=True, temperatures=True, twin=twin, spec_bench=spec_bench, as_paper=True, **sizes)
    return suite.evaluate(loaded, DOCUMENTS, parts, show_progress=False)


def test_what_is_derived_follows_from_what_is_measured(figures: Figures) -> None:
    assert figures["theoretical_speed_up_percent"] == pytest.approx(100 / figures["mean_depth"] - 100)
    gain = 1 - figures["perplexity"] / figures["twin"]["perplexity"]
    assert figures["perplexity_gain_percent"] == pytest.approx(100 * gain)
    assert figures["speed_up_percent"] == pytest.approx(100 * (figures["latency"]["ratios"]["dense"] - 1))
    assert figures["speed_up_over"] == "dense"
    assert figures["flops"]["spoken"]["layers"] == figures["flops"]["all_exits"]["layers"]
    assert figures["greedy_agreement"] == 1


def test_the_figures_are_json_and_read_back_as_they_are(figures: Figures, tmp_path: Path) -> None:
    suite.write_json(figures, tmp_path / "figures.json")
    assert json.loads((tmp_path / "figures.json").read_text()) == json.loads(json.dumps(figures, allow_nan=False))


def test_every_part_has_its_section(figures: Figures) -> None:
    text = markdown(figures, ["routing"])
    sections = [line.removeprefix("## ").split(",")[0] for line in text.splitlines() if line.startswith("## ")]
    assert sections == [
        "Quality",
        "By position",
        "Routing",
        "Temperature 0",
        "MFLOPs per token",
        "Speed",
        "Speed as the paper measures it",
        "Temperature",
    ]
    assert "| dense twin, dense |" in text
    assert "![routing](routing.png)" in text
    assert "For equal training FLOPs" in text
    assert "below the dense twin's" in text
    assert f"Its dense twin dense: {figures['twin']['num_parameters']:,} parameters, 4 layers of width" in text


def test_a_model_of_four_exits_stands_beside_the_papers() -> None:
    found = {
        "recipe": "paper-24x768",
        "exit_shares": [0.25] * 4,
        "exit_perplexities": [40.0] * 4,
        "perplexity": 30.0,
    }
    text = papers_routing(found | {"twin": {"perplexity": 31.0}})
    assert "| π_mix | – | – | 30 | 18.8 |" in text and "| dense twin | – | – | 31 | 19.46 |" in text
    assert "| dense twin | – | – | – | 19.46 |" in papers_routing(found)
    for other in ("paper-beta-0", None):
        assert papers_routing(found | {"recipe": other}) == ""


def test_a_runs_recipe_is_known_by_its_settings_whatever_its_length(tmp_path: Path) -> None:
    assert recipe_of(tmp_path) is None
    write_recipe(recipe_named("paper-24x768", ["total_tokens=1000000", "seed=3"]), tmp_path)
    assert recipe_of(tmp_path) == "paper-24x768"
    write_recipe(recipe_named("paper-beta-0.2", []), tmp_path)
    assert recipe_of(tmp_path) == "paper-beta-0.2"
    write_recipe(recipe_named("paper-24x768", ["beta.initial=0.17"]), tmp_path)
    assert recipe_of(tmp_path) is None


def test_tables_are_rectangular(figures: Figures) -> None:
    rows = [line for line in markdown(figures).splitlines() if line.startswith("|")]
    widths = [line.count("|") for line in rows]
    heads = [n for n, line in enumerate(rows) if line.startswith("| ---")]
    for head, following in zip(heads, [*heads[1:], len(rows) + 1], strict=True):
        assert len({*widths[head - 1 : following - 1]}) == 1


def test_a_report_has_its_text_figures_and_samples(loaded: LoadedModel, figures: Figures, tmp_path: Path) -> None:
    suite.write_report(loaded, figures, DOCUMENTS, tmp_path)
    written = {path.name for path in tmp_path.iterdir()}
    plots = {"routing.png", "perplexity.png", "reliability.png", "staircase.png"}
    assert written == {"report.md", "evaluation.json", "samples.html"} | plots
    assert "A fox met two hens." in (tmp_path / "samples.html").read_text()


def test_a_model_without_early_exits_is_reported_too(twin: LoadedModel, tmp_path: Path) -> None:
    figures = suite.evaluate(twin, DOCUMENTS, suite.Parts(), show_progress=False)
    suite.write_report(twin, figures, DOCUMENTS, tmp_path)
    assert figures["theoretical_speed_up_percent"] == 0
    assert "| router |" not in (tmp_path / "report.md").read_text()


def test_what_rounded_weights_cost_stands_beside_the_unrounded_perplexity(loaded: LoadedModel) -> None:
    rounded = load_byte_model(context=64)
    quantize_as(rounded.model, "q4")
    figures = suite.evaluate(rounded, DOCUMENTS, suite.Parts(unrounded=loaded), show_progress=False)
    exact = suite.evaluate(loaded, DOCUMENTS, suite.Parts(), show_progress=False)["perplexity"]
    found = figures["rounding"]
    assert found["unrounded_perplexity"] == exact != figures["perplexity"]
    assert found["price_percent"] == pytest.approx(100 * (figures["perplexity"] / exact - 1))
    low, high = found["price_interval_percent"]
    assert low <= found["price_percent"] <= high
    assert f"above that of the weights as they are, {exact:.4f}" in markdown(figures)


def test_speed_is_measured_on_openings_where_there_is_a_twin_and_no_spec_bench(twin: LoadedModel) -> None:
    [(category, prompts)] = suite.speed_prompts(["x" * 500] * 20, suite.Parts(twin=twin)).items()
    assert (category, len(prompts), len(prompts[0])) == ("openings", 8, 200)
    [prompts] = suite.speed_prompts(["x" * 500] * 20, suite.Parts(twin=twin, prompts_per_category=3)).values()
    assert len(prompts) == 3
    assert suite.speed_prompts(DOCUMENTS, suite.Parts()) == {}


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("prompts", {"prompts_per_category": 2}),
        ("trials", {"trials": 5}),
        ("clock", {"clock": "processor"}),
        ("as-paper", {"as_paper": True}),
    ],
)
def test_settings_of_a_speed_that_is_not_measured_are_refused(
    loaded: LoadedModel, name: str, setting: dict[str, int]
) -> None:
    with pytest.raises(EvaluationError, match=f"--{name}: means nothing"):
        suite.evaluate(loaded, [], suite.Parts(**setting), show_progress=False)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_the_processors_time_of_several_threads_is_refused_as_it_is_no_speed(
    loaded: LoadedModel, twin: LoadedModel, monkeypatch: pytest.MonkeyPatch, num_threads: int
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    with nullcontext() if num_threads == 1 else pytest.raises(EvaluationError, match=r"--clock: .* needs --threads 1"):
        suite.check(loaded, suite.Parts(twin=twin, clock="processor"))


def test_a_twin_with_another_tokenizer_is_refused_before_anything_is_measured(loaded: LoadedModel) -> None:
    other = LoadedModel("other", random_model([4], vocab_size=257), load_byte_model().tokenizer)
    other.tokenizer.add_tokens(["fox"])
    with pytest.raises(EvaluationError, match="another tokenizer"):
        suite.evaluate(loaded, [], suite.Parts(twin=other), show_progress=False)


def test_a_model_with_early_exits_is_no_twin(loaded: LoadedModel) -> None:
    with pytest.raises(EvaluationError, match="--twin: bytes has early exits"):
        suite.evaluate(loaded, [], suite.Parts(twin=loaded), show_progress=False)


def test_documents_too_short_for_temperatures_are_refused_before_anything_is_measured(loaded: LoadedModel) -> None:
    with pytest.raises(EvaluationError, match="temperatures: no document of the text has 64 tokens"):
        suite.evaluate(loaded, [], suite.Parts(temperatures=True), show_progress=False)


def test_tasks_without_lm_eval_are_refused_before_anything_is_measured(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(EvaluationError, match="lm_eval"):
        suite.evaluate(loaded, [], suite.Parts(tasks=["arc_easy"]), show_progress=False)


def test_results_that_could_not_be_written_are_refused_beforehand(tmp_path: Path) -> None:
    with pytest.raises(EvaluationError, match="no such folder"):
        suite.check_places(tmp_path / "nowhere" / "figures.json", None)
    suite.check_places(tmp_path / "figures.json", tmp_path / "a" / "report")
    assert (tmp_path / "a" / "report").is_dir()


def test_the_description_names_the_shape(figures: Figures) -> None:
    assert (figures["model"], figures["exit_layers"], figures["num_layers"]) == ("bytes", EXIT_LAYERS, 4)


def test_a_model_that_a_run_has_left_is_called_as_the_run_and_has_read_what_that_says(
    loaded: LoadedModel, tmp_path: Path
) -> None:
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
