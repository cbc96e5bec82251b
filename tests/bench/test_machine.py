import pytest
import torch

from nvium_core.bench.machine import machine


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_bandwidth_and_flops_are_measured_in_every_precision_of_the_engine(dtype):
    measured = {"float64"} if dtype == torch.float64 else {"bfloat16", "float32"}
    found = machine(torch.zeros(1, dtype=dtype), buffer_bytes=2**18, enough_seconds=0.0)
    assert found["flops_per_second"].keys() == measured
    assert min(found["bytes_per_second"], *found["flops_per_second"].values()) > 1e6
