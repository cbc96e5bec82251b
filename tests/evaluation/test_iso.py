"""Dense models of equal cost against the paper's isoFLOP and isoSpeed rows."""

import pytest

from nvium_core.evaluation.iso import evaluate_iso, iso_flop_tokens, iso_speed_layers, markdown
from nvium_core.evaluation.predictions import EvaluationError
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


def test_a_model_stands_beside_dense_ones_of_its_width() -> None:
    loaded = load_byte_model(context=64)
    figures = evaluate_iso(loaded, [2, 6], num_tokens=1000, trials=1, show_progress=False)
    shallow, deep = figures["dense"]
    assert (shallow["layers"], deep["layers"]) == (2, 6)
    assert shallow["flops"] < figures["flops"] and shallow["tokens"] > 1000
    assert deep["tokens"] * deep["flops"] == pytest.approx(1000 * figures["flops"])
    assert all(each["milliseconds"] > 0 for each in (figures, shallow, deep))
    times = {row["layers"]: row["milliseconds"] for row in figures["dense"]}
    assert figures["iso_speed_layers"] == pytest.approx(iso_speed_layers(times, figures["milliseconds"]))
    shown = markdown(figures)
    assert "| bytes | 4 |" in shown and shown.count("| dense |") == 2 and "layers takes as long per token" in shown


@pytest.mark.parametrize("depths", [[4], [4, 4], [0, 4]])
def test_depths_that_have_no_line_are_refused(depths: list[int]) -> None:
    with pytest.raises(EvaluationError, match="--depths: needs two or more"):
        evaluate_iso(load_byte_model(), depths, num_tokens=1, trials=1)
