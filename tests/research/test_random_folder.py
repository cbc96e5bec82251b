import sys

import pytest

from nvium_core import Engine, SamplingParams, load_model
from research import random_folder

PLACES = {"llama-1b": ["layer 1"], "ouro-1.4b": [f"loop {k}" for k in range(1, 5)]}


@pytest.mark.parametrize("shape", PLACES)
def test_a_random_folder_can_be_loaded(monkeypatch, tmp_path, shape):
    small = {"vocab_size": 8192, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16}
    for config in (random_folder.LLAMA_3_2_1B, random_folder.PUBLISHED["ouro-1.4b"]):
        for name, value in (small | {"num_key_value_heads": 4}).items():
            monkeypatch.setitem(config, name, value)
    monkeypatch.setattr(sys, "argv", ["random_folder", str(tmp_path), "--shape", shape, "--layers", "1"])
    random_folder.main()
    model = load_model(str(tmp_path)).model
    assert model.config.exit_places == PLACES[shape]
    completion = Engine(model).generate([[1, 2]], SamplingParams(max_tokens=64, seed=0, sampling="exits"))[0]
    assert {*completion.exits} == {*range(1, len(PLACES[shape]) + 1)}
