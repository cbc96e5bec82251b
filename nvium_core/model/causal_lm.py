"""The N-vium as a Hugging Face model: `from_pretrained`, `generate`, Trainer and the Auto classes.

The server does not import this module, because transformers' modelling code takes two seconds to import.
"""

import os
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    Cache,
    DynamicCache,
    GenerationMixin,
    PreTrainedModel,
)
from transformers import initialization as init
from transformers.cache_utils import DynamicLayer
from transformers.masking_utils import create_causal_mask

from nvium_core.model.config import NviumConfig
from nvium_core.model.exits import Adapter, Router
from nvium_core.model.llama import Attend, RMSNorm, RotaryEmbedding, causal_attention
from nvium_core.model.nvium import HUB_OPTIONS, Nvium, NviumOutput, generation_config


class NviumForCausalLM(Nvium, PreTrainedModel, GenerationMixin):
    """An N-vium as a Hugging Face causal language model whose logits are log π_mix."""

    config: NviumConfig
    config_class = NviumConfig
    base_model_prefix = "model"
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _no_split_modules = ["Layer"]
    _supports_sdpa = True
    num_parameters = PreTrainedModel.num_parameters  # Trainer passes arguments that Nvium's does not have

    def __init__(self, config: NviumConfig) -> None:
        super().__init__(config, config)
        self.post_init()

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls,
        folder: str | os.PathLike[str],
        *,
        config: NviumConfig | None = None,
        exits: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> Self:
        """Load a model like `Nvium.from_pretrained`; `options`, such as dtype, are passed to transformers."""
        hub_options = {name: options.pop(name) for name in HUB_OPTIONS if name in options}
        options.setdefault("dtype", options.pop("torch_dtype", "auto"))  # the old name in transformers
        checkpoint, _ = cls.read_checked(folder, config, exits, **hub_options)
        options["dtype"] = checkpoint.dtype if options["dtype"] == "auto" else options["dtype"]
        tensors = {name: checkpoint.numbers(name, options["dtype"]) for name in checkpoint.tensors}
        model: Self = super(Nvium, cls).from_pretrained(None, config=checkpoint.config, state_dict=tensors, **options)
        model.generation_config = generation_config(checkpoint) or model.generation_config
        return model

    @classmethod
    def is_custom_code(cls) -> bool:
        """Return False. Otherwise transformers does not call `_init_weights` for modules without own parameters."""
        return False

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialise with Normal(0, initializer_range). Adapters and router heads follow the authors' code."""
        super()._init_weights(module)
        width = self.config.hidden_size
        if isinstance(module, RMSNorm):
            init.ones_(module.weight)
        elif isinstance(module, Adapter):
            init.normal_(module.up.weight, std=width**-0.5)
            init.zeros_(module.down.weight)
        elif isinstance(module, Router):
            init.normal_(module.head.weight, std=0.4 * width**-0.5)  # as in the authors' code
            init.zeros_(module.head.bias)
        elif isinstance(module, RotaryEmbedding):
            init.copy_(module.inv_freq, module.frequencies()[0])

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        labels: Tensor | None = None,
        output_exit_logits: bool = False,
        output_hidden_states: bool | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        **unused: Any,
    ) -> NviumOutput:
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        if position_ids is None:
            past = past_key_values.get_seq_length() if past_key_values is not None else 0
            position_ids = past + torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        if output_hidden_states is None:
            output_hidden_states = bool(self.config.output_hidden_states)
        attend = self._cached_attention(input_ids, attention_mask, position_ids, past_key_values)
        out = self.forward_with_attention(
            input_ids, position_ids, attend, labels, output_exit_logits, output_hidden_states, logits_to_keep
        )
        out.past_key_values = past_key_values
        return out

    def _cached_attention(
        self, input_ids: Tensor, attention_mask: Tensor | None, position_ids: Tensor, cache: Cache | None
    ) -> Attend:
        if isinstance(cache, DynamicCache):  # transformers makes one cache for each stored layer
            cache.layers += [DynamicLayer() for _ in range(self.config.num_calls - len(cache.layers))]
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=self.model.embed_tokens.weight.new_empty(*input_ids.shape, 1),
            attention_mask=attention_mask,
            past_key_values=cache,
            position_ids=position_ids,
        )
        assert mask is None or isinstance(mask, Tensor)
        return causal_attention(mask, None if cache is None else cache.update)


AutoConfig.register(NviumConfig.model_type, NviumConfig, exist_ok=True)
AutoModel.register(NviumConfig, NviumForCausalLM)
AutoModelForCausalLM.register(NviumConfig, NviumForCausalLM)
