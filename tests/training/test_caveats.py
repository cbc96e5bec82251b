import pytest

from nvium_core.training.caveats import caveats

FEW = {"model": "small", "training_tokens": 61_440, "num_parameters": 395_000}
ENOUGH = FEW | {"training_tokens": 395_000}


def test_a_model_that_has_read_less_than_a_token_per_parameter_has_a_caveat():
    assert caveats(FEW) == ["small has read 0.16 tokens per parameter: too few to compare models; the paper reads 20"]
    assert caveats(ENOUGH) == caveats(FEW | {"training_tokens": None}) == caveats({"model": "random"}) == []


def test_the_caveats_of_a_twin_are_those_of_the_comparison():
    assert caveats(ENOUGH | {"twin": FEW | {"model": "dense"}})[0].startswith("dense has read 0.16")


@pytest.mark.parametrize(("shares", "exit_"), [([0.985, 0.015], 1), ([0.0, 0.999], 2), ([0.97, 0.03], 0), ([1.0], 0)])
def test_routers_that_send_nearly_all_tokens_to_one_exit_are_a_caveat(shares, exit_):
    found = caveats(ENOUGH | {"exit_shares": shares})
    assert [f"leave at exit {exit_}" in caveat for caveat in found] == [True] * bool(exit_)
