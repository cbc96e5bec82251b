"""Dense models of equal cost against the paper's isoFLOP and isoSpeed rows."""

import pytest

from nvium_core.evaluation.iso import iso_flop_tokens, iso_speed_layers
from nvium_core.evaluation.predictions import EvaluationError
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
