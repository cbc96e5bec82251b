"""Evaluations beside one another: the table, the paper's rows of the same shape, and the points of the figure."""

import json
from pathlib import Path
from typing import Any

import pytest

from nvium_core.evaluation import comparison
from nvium_core.evaluation.paper import PARETO, SCALES, Point
from nvium_core.evaluation.predictions import EvaluationError

PAPER_SIZED = {
    "model": "large",
    "num_parameters": 226_000_000,
    "training_tokens": 4_522_000_000,
    "num_layers": 24,
    "width": 768,
    "exit_layers": [6, 12, 18, 24],
    "exit_shares": [0.1, 0.2, 0.3, 0.4],
    "perplexity": 18.8,
    "twin": {"perplexity": 19.46, "num_parameters": 228_000_000, "training_tokens": 4_522_000_001},
    "perplexity_gain_percent": 3.39,
    "mean_depth": 0.75,
    "theoretical_speed_up_percent": 33.3,
    "speed_up_percent": 21.0,
    "speed_up_over": "dense",
}
SMALL: dict[str, Any] = {"model": "small", "num_layers": 2, "width": 32, "exit_layers": [1, 2], "perplexity": 30.0}
CALM = {"model": "calm .9", "family": "CALM*", "speed_up_percent": 10.0, "perplexity_gain_percent": -1.5}


def test_what_is_not_known_is_a_dash_and_the_papers_row_stands_beside_its_shape() -> None:
    _, _, large, small = comparison.markdown([PAPER_SIZED, SMALL]).splitlines()
    assert large.startswith(
        "| large | 226,000,000 | 228,000,000 | 4,522,000,000 | 4,522,000,001 | 18.8 | 19.46 | 3.39 | 0.75 |"
    )
    assert "| 0.10 0.20 0.30 0.40 | 33.3 | 21 |" in large
    assert large.endswith("| 48 | 26.8 |")
    assert small == "| small | – | – | – | – | 30 | – | – | – | – | – | – | – | – | – |"
    assert "paper" not in comparison.markdown([SMALL])


def test_a_speed_over_full_depth_is_not_shown_as_one_over_dense() -> None:
    assert comparison.row(PAPER_SIZED | {"speed_up_over": "full depth"})[-1] is None


def test_what_may_be_no_difference_is_level() -> None:
    assert comparison.row(PAPER_SIZED | {"speed_up_interval_percent": [-3.0, 44.0]})[-1] == "21 (-3 to 44: level)"


def test_points_are_sorted_by_speed_within_their_family() -> None:
    faster = PAPER_SIZED | {"model": "faster", "speed_up_percent": 40.0}
    found = comparison.points([faster, SMALL, CALM, PAPER_SIZED])
    assert found == {
        "N-vium": [("large", Point(21.0, 3.39)), ("faster", Point(40.0, 3.39))],
        "CALM*": [("calm .9", Point(10.0, -1.5))],
    }


def test_the_figure_is_drawn_with_the_papers_points(tmp_path: Path) -> None:
    for with_paper in (False, True):
        comparison.draw([PAPER_SIZED, CALM], tmp_path / f"{with_paper}.png", with_paper=with_paper)
    assert (tmp_path / "True.png").stat().st_size > (tmp_path / "False.png").stat().st_size


def test_nothing_to_draw_and_other_kinds_of_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(EvaluationError, match="nothing to draw"):
        comparison.points([SMALL])
    with pytest.raises(EvaluationError, match=r"must be a \.png"):
        comparison.draw([PAPER_SIZED], tmp_path / "pareto.pdf")


@pytest.mark.parametrize("content", ["{", "[]", "{}", "3", '[{"model": "small"}, {}]', '["model"]'])
def test_a_file_that_is_no_evaluation_is_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(content)
    with pytest.raises(EvaluationError, match=r"other\.json"):
        comparison.read_evaluations([path])


def test_evaluations_are_read_in_order(tmp_path: Path) -> None:
    paths = [tmp_path / f"{each['model']}.json" for each in (PAPER_SIZED, SMALL)]
    for path, each in zip(paths, (PAPER_SIZED, SMALL), strict=True):
        path.write_text(json.dumps(each))
    assert comparison.read_evaluations(paths) == [PAPER_SIZED, SMALL]


def test_a_file_may_hold_several(tmp_path: Path) -> None:
    one, several = tmp_path / "one.json", tmp_path / "several.json"
    one.write_text(json.dumps(SMALL))
    several.write_text(json.dumps([CALM, PAPER_SIZED]))
    assert comparison.read_evaluations([several, one]) == [CALM, PAPER_SIZED, SMALL]


def test_the_papers_nvium_does_not_stand_beside_another_method() -> None:
    assert comparison.papers(PAPER_SIZED) is not None
    assert comparison.papers(PAPER_SIZED | {"family": "CALM*"}) is None


def test_the_papers_figures_agree_with_one_another() -> None:
    assert SCALES[24, 768].perplexity_gain == pytest.approx(100 * (1 - 18.8 / 19.46), abs=0.4)
    assert all(point.perplexity_gain < 0 for point in PARETO["CALM*"])
