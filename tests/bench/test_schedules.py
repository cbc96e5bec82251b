"""The schedule benchmark, on a model too small for its figures to mean anything."""

import pytest

from nvium_core.bench.schedules import compare
from tests.byte_model import load_byte_model


def test_every_schedule_is_measured_beside_synchronous() -> None:
    figures = compare(load_byte_model(), num_sequences=2, num_tokens=4, repeats=1, threads=None)
    assert figures["sweep_tokens_per_second"] > 0
    assert figures["synchronous_tokens_per_second"] > 0
    ratio = figures["sweep_tokens_per_second"] / figures["synchronous_tokens_per_second"]
    assert figures["sweep_over_synchronous"] == pytest.approx(ratio)
