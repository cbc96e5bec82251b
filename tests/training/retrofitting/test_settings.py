from pathlib import Path
from typing import Any

import pytest

from nvium_core.model.config import NviumConfig
from nvium_core.training.errors import TrainingError
from nvium_core.training.options import RetrofitSettings
from nvium_core.training.retrofitting.settings import checked_config

LLAMA = NviumConfig(num_hidden_layers=30, hidden_size=64, num_attention_heads=4, adapter_hidden_size=0)


def settings(**more: Any) -> RetrofitSettings:
    return RetrofitSettings(**{"source": "llama", "target": Path("target"), "data": Path(__file__)} | more)


@pytest.mark.parametrize(
    ("exits", "layers"), [("4", [8, 15, 22, 30]), ("2", [15, 30]), ("12,18,24", [12, 18, 24, 30]), ("12,30", [12, 30])]
)
def test_exits_are_evenly_spaced_or_at_the_given_layers(exits, layers):
    added = checked_config(settings(exits=exits), LLAMA)
    assert added.exit_layers == layers
    assert added.adapter_hidden_size == 128
    assert added.default_sampling == "original"


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"exits": "20,"}, "must be a number, or layers such as 12,18,24"),
        ({"exits": "1"}, r"number of exits must be in \[2, 30\], got 1"),
        ({"exits": "31"}, r"number of exits must be in \[2, 30\], got 31"),
        ({"exits": "20,10"}, r"must be in \[1, 30\] and increase, got 20,10"),
        ({"exits": "12,40"}, r"must be in \[1, 30\] and increase, got 12,40"),
        ({"exits": "0,12"}, r"must be in \[1, 30\] and increase, got 0,12"),
        ({"depth": 0.2}, r"depth must be in \(0\.267, 1\), above the depth of the first exit, got 0\.2"),
        ({"depth": 1.0}, "depth must be in"),
        ({"data": Path("nowhere")}, "nowhere: no such file"),
        ({"data": None, "exits_learn": "text"}, "exits_learn=text requires a text"),
    ],
)
def test_invalid_settings_are_refused(wrong, reason):
    with pytest.raises(TrainingError, match=reason):
        checked_config(settings(**wrong), LLAMA)


def test_only_a_plain_llama_can_be_retrofitted():
    with pytest.raises(TrainingError, match="already has exits or an adapter"):
        checked_config(settings(), NviumConfig(num_hidden_layers=2, exit_layers=[1, 2]))
    with pytest.raises(TrainingError, match="llama: is a looped model, which cannot be retrofitted"):
        checked_config(settings(), NviumConfig(num_hidden_layers=2, num_loops=2, adapter_hidden_size=0))
    with pytest.raises(TrainingError, match=r"llama: limits its logits \(final_logit_softcapping\)"):
        checked_config(settings(), NviumConfig(num_hidden_layers=2, logit_cap=30.0, adapter_hidden_size=0))
