"""Nodes of the layers in a CUDA graph. On a GPU each costs about 2 µs, so these numbers may only fall."""

import os
import subprocess
import sys

import pytest

from nvium_core.bench.shapes import shape_config
from nvium_core.model.config import NviumConfig
from tests.engine.device.fused.nodes import nodes_of_layers
from tests.engine.test_exactness import MAKES, fields_of

SIZES = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8}
SIZES |= {"head_dim": 64, "vocab_size": 128_256, "num_hidden_layers": 16}
LLAMA_1B = NviumConfig(**SIZES, exit_layers=[16], tie_word_embeddings=True)
SHAPES = {"24x768": shape_config("24x768", 4), "24x768 dense": shape_config("24x768", 1), "1B": LLAMA_1B}
SHAPES |= {str(make): NviumConfig(**SIZES, exit_layers=[16], **fields_of(make, 16)) for make in MAKES}


LAYER = 10
"""Four products, two additions with a norm, rotation, activation, and attention, which takes two for few rows."""


@pytest.mark.parametrize("num_rows", [1, 64])
@pytest.mark.parametrize("shape", SHAPES)
def test_layers_have_few_nodes(shape, num_rows):
    config = SHAPES[shape]
    nodes = nodes_of_layers(config, range(config.num_exits), num_rows)
    assert 0 < len(nodes) <= LAYER * config.num_hidden_layers + 1


@pytest.mark.slow
def test_the_kernels_compile_for_an_h100():
    command = (sys.executable, "-m", "tests.engine.device.fused.compiled")
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert "attend_pages" in run.stdout
