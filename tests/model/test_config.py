import pytest
from huggingface_hub.errors import StrictDataclassError

from nvium_core import NviumConfig
from nvium_core.model.config import even_exit_layers


def test_a_configuration_without_exits_is_a_univium() -> None:
    config = NviumConfig(num_hidden_layers=3)
    assert config.exit_layers == [3] and config.num_exits == 1


def test_the_router_and_the_adapters_take_the_papers_widths() -> None:
    config = NviumConfig(hidden_size=768, num_attention_heads=12)
    assert (config.router_hidden_size, config.adapter_hidden_size) == (506, 768)


def test_blocks_cover_every_layer_once() -> None:
    config = NviumConfig(num_hidden_layers=7, exit_layers=[1, 4, 7])
    assert config.blocks == [range(1), range(1, 4), range(4, 7)]


@pytest.mark.parametrize("exit_layers", [[], [2], [2, 5], [0, 4], [3, 3, 4], [3, 2, 4], [-1, 4]])
def test_exits_that_do_not_rise_to_full_depth_are_refused(exit_layers: list[int]) -> None:
    with pytest.raises(StrictDataclassError, match="exit_layers"):
        NviumConfig(num_hidden_layers=4, exit_layers=exit_layers)


@pytest.mark.parametrize("temperature", [0, -1.0])
def test_a_router_temperature_that_is_not_positive_is_refused(temperature: float) -> None:
    with pytest.raises(StrictDataclassError, match="router_temperature"):
        NviumConfig(router_temperature=temperature)


def test_even_exits_divide_the_depth() -> None:
    assert even_exit_layers(24, 4) == [6, 12, 18, 24]
    with pytest.raises(ValueError, match="10 layers cannot be divided evenly among 4"):
        even_exit_layers(10, 4)
