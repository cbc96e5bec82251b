"""Dense models of equal cost against the paper's isoFLOP and isoSpeed rows."""

from pathlib import Path

import pytest

from nvium_core.bench.harness import Figures, subject_of
from nvium_core.evaluation.iso import (
    evaluate_iso,
    iso_flop_tokens,
    iso_speed_interval,
    iso_speed_layers,
    markdown,
    trained_tokens,
)
from nvium_core.evaluation.predictions import EvaluationError
from nvium_core.training.recipes.catalogue import recipe_named
from nvium_core.training.run_folder import write_recipe
from tests.byte_model import load_byte_model
from tests.model.paper_flops import PER_MILLE, paper_flops


@pytest.mark.parametrize(
    ("num_layers", "num_steps", "dense_layers", "dense_steps"), [(36, 23_731, 26, 39_646), (48, 30_211, 33, 50_729)]
)
def test_the_papers_dense_models_of_equal_flops_are_trained_for_its_number_of_steps(
    num_layers: int, num_steps: int, dense_layers: int, dense_steps: int
) -> None:
    steps = iso_flop_tokens(paper_flops(num_layers, 4).total, paper_flops(dense_layers, 1).total, num_steps)
    assert steps == pytest.approx(dense_steps, rel=PER_MILLE)


@pytest.mark.parametrize(("tokens_per_second", "dense_layers"), [(48.86, 26), (38.80, 33)])
def test_the_papers_dense_models_of_equal_speed_have_its_depths(tokens_per_second: float, dense_layers: int) -> None:
    dense_milliseconds = {26: 1000 / 48.36, 33: 1000 / 39.23}
    assert round(iso_speed_layers(dense_milliseconds, 1000 / tokens_per_second)) == dense_layers


def test_equal_speed_cannot_be_found_from_one_depth() -> None:
    with pytest.raises(EvaluationError, match="two depths"):
        iso_speed_layers({12: 3.0}, 2.0)


def test_an_interval_of_equal_speed_needs_three_turns_and_is_around_it() -> None:
    assert iso_speed_interval({6: [1.0, 1.0], 12: [2.0, 2.0]}, [1.5, 1.5]) is None
    dense, ours = {6: [1.0, 1.1, 0.9], 12: [2.0, 2.1, 1.9]}, [1.4, 1.5, 1.6]
    found = iso_speed_interval(dense, ours)
    assert found is not None and found[0] < 9 < found[1]
    steady = iso_speed_interval({6: [1.0] * 3, 12: [2.0] * 3}, [1.5] * 3)
    assert steady == pytest.approx((9, 9))


def test_a_model_stands_beside_dense_ones_of_its_width() -> None:
    subject = subject_of(load_byte_model(context=64))
    figures = evaluate_iso(subject, [2, 6], num_tokens=1000, trials=3, show_progress=False)
    shallow, deep = figures["dense"]
    assert (shallow["layers"], deep["layers"]) == (2, 6)
    assert shallow["num_parameters"] < figures["num_parameters"]
    assert shallow["flops"] < figures["flops"] and shallow["tokens"] > 1000
    assert deep["tokens"] * deep["flops"] == pytest.approx(1000 * figures["flops"])
    assert all(each["milliseconds"] > 0 for each in (figures, shallow, deep))
    times = {row["layers"]: row["milliseconds"] for row in figures["dense"]}
    assert figures["iso_speed_layers"] == pytest.approx(iso_speed_layers(times, figures["milliseconds"]))
    shown = markdown(figures)
    assert "| bytes | 4 |" in shown and shown.count("| dense |") == 2 and "layers takes as long per token" in shown
    assert "the paper's" not in shown


def test_the_papers_shapes_have_its_rows_beside_them() -> None:
    """The table of the paper, its FLOPs to the digits printed."""
    ours, dense = paper_flops(36, 4).total, paper_flops(26, 1).total
    tokens = trained_tokens(None, "36x768")
    assert tokens is not None
    figures: Figures = {"layers": 36, "width": 768, "iso_speed_layers": 26.0, "iso_speed_layers_interval": None}
    row: Figures = {"num_parameters": 311e6, "milliseconds": 20.0}
    figures |= row | {"model": "random-36x768", "flops": ours, "tokens": tokens}
    figures["dense"] = [row | {"layers": 26, "flops": dense, "tokens": iso_flop_tokens(ours, dense, tokens)}]
    [mine, its, theirs, their_dense] = [line.split(" | ") for line in markdown(figures).splitlines()[2:6]]
    assert theirs[0] == "| the paper's" and their_dense[1] == "26"
    for found, printed in ((mine, theirs), (its, their_dense)):
        assert float(found[4]) == pytest.approx(float(printed[4]), rel=PER_MILLE)
        assert float(found[5].replace(",", "")) == pytest.approx(float(printed[5].replace(",", "")), rel=2 * PER_MILLE)
    assert (theirs[3], theirs[6], their_dense[3], their_dense[6]) == ("48.86", "16.25 |", "48.36", "16.51 |")


def test_tokens_are_those_of_the_models_run(tmp_path: Path) -> None:
    model = str(tmp_path / "model")
    for unknown in ((None, None), (model, None), (None, "3x128")):
        assert trained_tokens(*unknown) is None
    write_recipe(recipe_named("tiny", []), tmp_path)
    assert trained_tokens(model, None) == 200_000


@pytest.mark.parametrize("depths", [[4], [4, 4], [0, 4]])
def test_depths_that_have_no_line_are_refused(depths: list[int]) -> None:
    with pytest.raises(EvaluationError, match="--depths: needs two or more"):
        evaluate_iso(subject_of(load_byte_model()), depths, num_tokens=1, trials=1)
