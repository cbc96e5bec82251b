"""Bytes and operations of a token, by hand."""

import pytest
import torch

from nvium_core.bench import machine as machines
from nvium_core.bench.machine import arithmetic_rate, beside, demands, machine, weight_bytes
from nvium_core.bench.peers import machine_line
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


def test_sequences_share_the_weights_and_each_reads_its_own_keys_and_values() -> None:
    model = random_model([1, 2, 4])
    twin = dense_twin(model)
    one, ten = (demands(model, twin, [0.5, 0.25, 0.25], 30, number) for number in (1, 10))
    keys_and_values = 30 * 2 * 4 * 2 * 4 * 8
    for name, found in ten.items():
        assert found["bytes"] - keys_and_values == pytest.approx((one[name]["bytes"] - keys_and_values) / 10)
    assert ten.keys() == {"synchronous", "dense twin"}


def test_what_is_asked_is_held_against_what_can_be_done() -> None:
    rates = {"bytes_per_second": 1000.0, "flops_per_second": {"bfloat16": 3.0, "float32": 400.0}}
    found = beside({"bytes": 50.0, "flops": 10.0}, rates, 10.0)
    assert found["least_ms_by_bandwidth"] == pytest.approx(50)
    assert found["least_ms_by_arithmetic"] == pytest.approx(25)
    assert found["share_of_bandwidth"] == pytest.approx(0.5)
    assert found["share_of_arithmetic"] == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("dtype", "measured"), [(torch.float64, {"float64"}), (torch.bfloat16, {"bfloat16", "float32"})]
)
def test_a_machine_reads_and_multiplies_in_every_precision_that_the_engine_may_use(
    dtype: torch.dtype, measured: set[str]
) -> None:
    found = machine(torch.zeros(1, dtype=dtype), buffer_bytes=2**18, enough_seconds=0.0)
    assert found["flops_per_second"].keys() == measured
    assert min(found["bytes_per_second"], *found["flops_per_second"].values()) > 1e6


def test_matrices_grow_until_their_product_takes_long_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    widths = []
    monkeypatch.setattr(torch, "matmul", lambda one, _: widths.append(len(one)))
    monkeypatch.setattr(machines, "seconds", lambda work: work() or widths[-1] ** 3 / 1e9)
    rate = arithmetic_rate(torch.float32, torch.device("cpu"), enough_seconds=0.02)
    assert sorted(set(widths)) == [128, 256, 512]
    assert rate == pytest.approx(2e9)


def test_a_slow_machine_is_never_told_to_do_nothing() -> None:
    slow = {"instructions": None, "threads": 2, "bytes_per_second": 4.2e7, "flops_per_second": {"bfloat16": 5.1e5}}
    assert machine_line(slow) == ("With 2 threads the machine reads 0.042 GB/s and does 0.00051 Gflop/s in bfloat16.")
