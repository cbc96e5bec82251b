"""Integer products of quantized matrices."""

import subprocess

from nvium_core.engine.device.native.instructions import FLAGS
from tests.engine.device.native.compiling import compiled


def test_products_of_every_quantized_type_equal_sums_in_double_for_any_number_of_rows(instructions):
    program = compiled("products.cpp", "c++", "-O2", *FLAGS[instructions])
    assert subprocess.run([str(program)], check=False, capture_output=True, text=True).stdout == ""
