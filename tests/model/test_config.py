from dataclasses import fields

import pytest
from huggingface_hub.errors import StrictDataclassError
from transformers import LlamaConfig

from nvium_core import NviumConfig


def test_without_exits_a_configuration_is_a_univium_and_widths_are_the_papers():
    config = NviumConfig(num_hidden_layers=3)
    assert config.exit_layers == [3] and config.num_exits == 1
    config = NviumConfig(hidden_size=768, num_attention_heads=12)
    assert (config.router_hidden_size, config.adapter_hidden_size) == (506, 768)


@pytest.mark.parametrize("exit_layers", [[], [2], [2, 5], [0, 4], [3, 3, 4], [3, 2, 4], [-1, 4]])
def test_exits_that_do_not_increase_to_full_depth_are_rejected(exit_layers):
    with pytest.raises(StrictDataclassError, match="exit_layers"):
        NviumConfig(num_hidden_layers=4, exit_layers=exit_layers)


def test_defaults_are_llamas():
    ours, llamas = NviumConfig(), LlamaConfig()
    for name in {field.name for field in fields(NviumConfig)} & {field.name for field in fields(LlamaConfig)}:
        assert getattr(ours, name) == getattr(llamas, name) or name in ("architectures", "model_type"), name
