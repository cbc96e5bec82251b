"""Bytes and operations of a token, by hand."""

import pytest
import torch

from nvium_core.bench.machine import beside, demands, machine, weight_bytes
from nvium_core.bench.twin import dense_twin
from tests.random_models import random_model

WIDTH, VOCABULARY = 16, 17
NORM, MATRIX = 4 * WIDTH, 4 * WIDTH * WIDTH
LAYER = 2 * MATRIX + 2 * (MATRIX // 2) + 3 * 2 * MATRIX + 2 * NORM
"""Queries and output, keys and values of half as many heads, an MLP of twice the width, two norms; in float32."""
HEAD = 4 * WIDTH * VOCABULARY
ADAPTER = 2 * MATRIX
INNER = int(0.66 * WIDTH)
ROUTER = 4 * (2 * WIDTH * INNER + INNER + WIDTH + WIDTH + 2 * WIDTH + 2)


def test_a_token_reads_the_blocks_it_passes_and_is_spared_the_others() -> None:
    model = random_model([1, 3], dtype=torch.float32)
    first, second = LAYER, 2 * LAYER
    junctions = (NORM + ROUTER) + 0.25 * NORM
    assert weight_bytes(model, [0.75, 0.25], skips=True) == first + 0.25 * second + junctions + ADAPTER + HEAD
    assert weight_bytes(model, [3, 1], skips=False) == first + second + junctions + ADAPTER + HEAD


def test_ways_of_decoding_differ_in_what_they_read_only() -> None:
    model = random_model([1, 2, 4])
    asked = demands(model, dense_twin(model), [0.5, 0.25, 0.25], 30)
    assert asked["optimal"]["bytes"] < asked["synchronous"]["bytes"]
    assert asked["optimal"]["flops"] == asked["synchronous"]["flops"]


def test_what_is_asked_is_held_against_what_can_be_done() -> None:
    found = beside({"bytes": 50.0, "flops": 10.0}, {"bytes_per_second": 1000.0, "flops_per_second": 400.0}, 10.0)
    assert found["least_ms_by_bandwidth"] == pytest.approx(50)
    assert found["least_ms_by_arithmetic"] == pytest.approx(25)
    assert found["share_of_bandwidth"] == pytest.approx(0.5)
    assert found["share_of_arithmetic"] == pytest.approx(0.25)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_machine_reads_and_reckons(dtype: torch.dtype) -> None:
    found = machine(torch.zeros(1, dtype=dtype), buffer_bytes=2**18, matrix_width=32)
    assert found.keys() == {"bytes_per_second", "flops_per_second"}
    assert min(found.values()) > 1e6
