from pathlib import Path
from typing import Any

import pytest

from nvium_core.model.config import NviumConfig
from nvium_core.training.retrofitting.settings import RetrofitSettings
from nvium_core.training.retrofitting.shape import RetrofitError

LLAMA = NviumConfig(num_hidden_layers=30, hidden_size=64, num_attention_heads=4, adapter_hidden_size=0)


def settings(**more: Any) -> RetrofitSettings:
    return RetrofitSettings(source="llama", target=Path("target"), data=Path(__file__), **more)


@pytest.mark.parametrize(
    ("exits", "layers"),
    [("4", [8, 15, 22, 30]), ("2", [15, 30]), ("12,18,24", [12, 18, 24, 30]), ("12,30", [12, 30]), ("20,", None)],
)
def test_exits_are_even_or_as_asked(exits: str, layers: list[int] | None) -> None:
    if layers is None:
        with pytest.raises(RetrofitError, match="number of exits or layers such as 12,18,24"):
            settings(exits=exits).check(LLAMA)
    else:
        added = settings(exits=exits).check(LLAMA)
        assert added.exit_layers == layers
        assert added.adapter_hidden_size == 128
        assert added.default_sampling == "original"


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"exits": "1"}, "between 2 and the model's 30 layers, got 1"),
        ({"exits": "31"}, "between 2 and the model's 30 layers, got 31"),
        ({"exits": "20,10"}, "layers between 1 and the model's 30, in rising order, got 20,10"),
        ({"exits": "12,40"}, "layers between 1 and the model's 30, in rising order, got 12,40"),
        ({"exits": "0,12"}, "layers between 1 and the model's 30, in rising order, got 0,12"),
        ({"depth": 0.2}, r"depth must be between 0\.267, that of the first exit, and 1"),
        ({"depth": 1.0}, "depth must be between"),
    ],
)
def test_what_cannot_be_had_is_refused(wrong: dict[str, Any], reason: str) -> None:
    with pytest.raises(RetrofitError, match=reason):
        settings(**wrong).check(LLAMA)


def test_only_a_plain_llama_and_a_text_that_is_there() -> None:
    with pytest.raises(RetrofitError, match="has exits or an adapter already"):
        settings().check(NviumConfig(num_hidden_layers=2, exit_layers=[1, 2]))
    missing = RetrofitSettings(source="llama", target=Path("target"), data=Path("nowhere"))
    with pytest.raises(RetrofitError, match="nowhere: no such text"):
        missing.check(LLAMA)
    with pytest.raises(RetrofitError, match="exits learn a text that is given"):
        RetrofitSettings(source="llama", target=Path("target"), exits_learn="text").check(LLAMA)
