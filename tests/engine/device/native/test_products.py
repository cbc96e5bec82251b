"""Halves, products of quantized matrices and of AMX tiles, and the threads that compute them."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from deploy.release import PLATFORMS
from nvium_core.engine.device import processor
from nvium_core.engine.device.native import library
from nvium_core.engine.device.native.library import FLAGS
from tests.engine.device.native.compiling import printed


def test_products_of_every_quantized_type_equal_sums_in_double_for_any_number_of_rows(instructions):
    assert printed("products.cpp", "c++", "-O2", *FLAGS[instructions]) == ""


def test_halves_are_the_nearest_and_read_exactly(instructions):
    assert printed("halves.cpp", "c++", "-O2", *FLAGS[instructions]) == ""


def test_attention_equals_sums_in_double(instructions):
    assert printed("attention.cpp", "c++", "-O3", "-pthread", *FLAGS[instructions]) == ""


@pytest.mark.skipif("avx512" not in processor.available(), reason="tiles are compiled for AVX-512 only")
def test_emulated_tiles_multiply_like_sums_in_double():
    assert printed("tiles.cpp", "c++", "-O2", *FLAGS["avx512"]) == ""


@pytest.mark.skipif("avx512" not in processor.available(), reason="compiled for AVX-512 only")
@pytest.mark.parametrize("platform", [None, pytest.param("manylinux_2_28_x86_64", marks=pytest.mark.slow)])
def test_features_of_the_processor_are_those_that_linux_names(platform):
    if platform and find_spec("ziglang") is None:
        pytest.skip("no ziglang here")
    compiler = library._command("avx512", PLATFORMS.get(platform))
    found = printed("features.cpp", *(option for option in compiler if option != "-shared"))
    flags = Path("/proc/cpuinfo").read_text().split()
    assert found.split() == [name for name in ("avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8") if name in flags]


def test_a_part_without_memory_fails_the_whole_loop_but_not_the_next():
    assert printed("pool.cpp", "c++", "-O1") == ""
