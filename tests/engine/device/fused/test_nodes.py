"""Nodes of a pass's CUDA graph. On a GPU each costs about 2 µs, so these numbers may only fall."""

import os
import subprocess
import sys

import pytest

from nvium_core.bench.shapes import PAPER_ROUTING, shape_config
from nvium_core.engine.device.graphs.backend import DRAW, PASS, ROUTE
from nvium_core.engine.device.inputs import Variant
from nvium_core.model.config import NviumConfig
from tests.engine.device.fused.nodes import meta_backend, nodes_of

LLAMA_1B = NviumConfig(
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=16,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=64,
    vocab_size=128_256,
    exit_layers=[16],
    tie_word_embeddings=True,
)
SHAPES = {"24x768": shape_config("24x768", 4), "24x768 dense": shape_config("24x768", 1), "1B": LLAMA_1B}


LAYER = 10
"""Four products, two additions with a norm, rotation, activation, and attention, which takes two for few rows."""

MOST = {"24x768": (13, 16), "24x768 dense": (9, 12), "1B": (9, 12)}
"""Nodes outside the layers: without and with a mixture of exits."""


@pytest.mark.parametrize("mixes", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_pass_has_few_nodes(shape, mixes):
    config = SHAPES[shape]
    backend = meta_backend(config)
    nodes = nodes_of(backend, PASS, range(config.num_exits), Variant(1, 4, mixes=mixes))
    assert len(nodes) <= LAYER * config.num_hidden_layers + MOST[shape][mixes]


def test_exits_launch_less_than_a_whole_pass_at_the_shares_of_the_paper():
    backend = meta_backend(SHAPES["24x768"])

    def count(part: str, blocks: range) -> int:
        return len(nodes_of(backend, part, blocks, Variant(1, 4)))

    num_passed = [sum(PAPER_ROUTING[block:]) for block in range(4)]
    expected = num_passed[3] * count(PASS, range(3, 4))
    for block, (num_here, num_drawn) in enumerate(zip(num_passed[:3], PAPER_ROUTING, strict=False)):
        blocks = range(block, block + 1)
        expected += num_here * count(ROUTE, blocks) + num_drawn * count(DRAW, blocks)
    assert expected <= 0.74 * count(PASS, range(4))


@pytest.mark.slow
def test_the_kernels_compile_for_an_h100():
    command = (sys.executable, "-m", "tests.engine.device.fused.compiled")
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert "sample_tokens" in run.stdout
