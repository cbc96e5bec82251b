"""The N-vium as a Hugging Face causal language model: a Llama with exits whose logits are log π_mix.

Shapes: B sequences, T tokens, D width, E exits, V vocabulary; X any row dimensions.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    Cache,
    DynamicCache,
    GenerationConfig,
    GenerationMixin,
    PreTrainedModel,
)
from transformers import initialization as init
from transformers.masking_utils import create_causal_mask
from transformers.utils import GENERATION_CONFIG_NAME
from transformers.utils.generic import ModelOutput

from nvium_core.model import mixture
from nvium_core.model.checkpoint import CheckpointError, one_line
from nvium_core.model.config import NviumConfig, check_end_token_ids
from nvium_core.model.drafter import Drafter
from nvium_core.model.exits import Adapter, Exit, Router
from nvium_core.model.llama import Attend, Llama, RMSNorm, dense_attention
from nvium_core.model.source import read_source

HUB_OPTIONS = ("revision", "token", "cache_dir", "local_files_only")
ROUTER_HEAD_STD = 0.4  # of the router head's normal initialisation, times 1/√d (authors' code)


@dataclass
class NviumOutput(ModelOutput):
    """The result of a forward pass. Losses are means over the labelled tokens and None without labels.

    loss: L_mix, also what Trainer minimises. logits: log π_mix [B, T, V]. exit_probs: p_k [B, T, E]. exit_logits: each
    exit's own logits [B, T, E, V], on request. compute_loss: L_compute. balance_loss: L_balance. exit_losses:
    cross-entropy of each exit alone [E]. hidden_states: the embeddings and the output of each layer, before any norm,
    [B, T, D] each, on request. last_hidden_state: what the head reads at the last exit [B, T, D].
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    exit_probs: Tensor | None = None
    exit_logits: Tensor | None = None
    mix_loss: Tensor | None = None
    compute_loss: Tensor | None = None
    balance_loss: Tensor | None = None
    exit_losses: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    past_key_values: Cache | None = None
    last_hidden_state: Tensor | None = None


class NviumForCausalLM(PreTrainedModel, GenerationMixin):
    """N exits after layers `config.exit_layers`, one head W_lm shared by all (paper, section 3)."""

    config: NviumConfig
    config_class = NviumConfig
    base_model_prefix = "model"
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _no_split_modules = ["Layer"]
    _supports_sdpa = True
    supports_gradient_checkpointing = True

    def __init__(self, config: NviumConfig) -> None:
        super().__init__(config)
        self.model: Llama = Llama(config)
        self.exits = nn.ModuleList(
            Exit(config, depth == config.num_hidden_layers) for depth in config.exit_layers or []
        )
        self.drafter = Drafter(config) if config.drafter_hidden_size else None
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls, folder: str | os.PathLike[str], *, config: NviumConfig | None = None, **options: Any
    ) -> Self:
        """Load our layout, the authors' published layout, or a Llama or relative, from a folder, Hub name or GGUF file.

        A missing, extra or misshapen tensor raises `CheckpointError` naming it. `options` (dtype, …) are
        transformers' own.
        """
        hub_options = {name: options.pop(name) for name in HUB_OPTIONS if name in options}
        options.setdefault("dtype", options.pop("torch_dtype", "auto"))  # its old name
        dtype = None if options["dtype"] == "auto" else options["dtype"]
        checkpoint = read_source(folder, config, dtype, **hub_options)
        checkpoint.check_num_layers()
        try:
            empty = cls._empty(checkpoint.config)
        except Exception as error:  # whatever transformers makes of odd values
            raise CheckpointError(f"{checkpoint.folder / 'config.json'}: {one_line(error)}") from error
        checkpoint.check_against(empty)
        if dtype is None:
            options["dtype"] = checkpoint.dtype
        model: Self = super().from_pretrained(None, config=checkpoint.config, state_dict=checkpoint.tensors, **options)
        if (checkpoint.folder / GENERATION_CONFIG_NAME).exists():
            model.generation_config = generation_config(checkpoint.folder, checkpoint.config.vocab_size)
        return model

    @classmethod
    def _empty(cls, config: NviumConfig) -> Self:
        with torch.device("meta"), init.no_init_weights():
            return cls(config)

    @classmethod
    def is_custom_code(cls) -> bool:
        """False: otherwise transformers skips `_init_weights` on modules without parameters of their own, such as
        adapters."""
        return False

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Normal(0, initializer_range), except for adapters and router heads (authors' code)."""
        super()._init_weights(module)
        width = self.config.hidden_size
        if isinstance(module, RMSNorm):
            init.ones_(module.weight)
        elif isinstance(module, Adapter):
            init.normal_(module.up.weight, std=width**-0.5)
            init.zeros_(module.down.weight)
        elif isinstance(module, Router):
            init.normal_(module.head.weight, std=ROUTER_HEAD_STD * width**-0.5)
            init.zeros_(module.head.bias)

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed_tokens

    def hidden_states(self, input_ids_BT: Tensor, positions_BT: Tensor, attend: Attend) -> list[Tensor]:
        """The hidden states at every exit, E times [B, T, D]."""
        return self._states_after(self.config.blocks, self.model.embed_tokens(input_ids_BT), positions_BT, attend)

    def _states_after(
        self, parts: Iterable[Iterable[int]], h_BTD: Tensor, positions_BT: Tensor, attend: Attend
    ) -> list[Tensor]:
        """After each of these consecutive ranges of layers."""
        rotary = self.model.rotary(positions_BT, h_BTD.dtype)
        states = []
        for layers in parts:
            h_BTD = self.model.run(h_BTD, layers, rotary, attend)
            states.append(h_BTD)
        return states

    def exit_outputs(self, states: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Each exit's routing and its head input: log w [X, E, 2] and o_k, E times [X, D]."""
        log_w, outputs = zip(*(exit_(h_XD) for exit_, h_XD in zip(self.exits, states, strict=True)), strict=True)
        return torch.stack(log_w, dim=-2), list(outputs)

    def forward(
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
        """Full-depth forward pass. `labels` [B, T] are input ids (−100 ignored), shifted here as in every HF model."""
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        if position_ids is None:
            past = past_key_values.get_seq_length() if past_key_values is not None else 0
            position_ids = past + torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        attend = self._cached_attention(input_ids, attention_mask, position_ids, past_key_values)
        position_ids = position_ids.expand_as(input_ids)
        all_states = None
        if self.config.output_hidden_states if output_hidden_states is None else output_hidden_states:
            embedded = self.model.embed_tokens(input_ids)
            each = [[layer] for layer in range(self.config.num_hidden_layers)]
            all_states = (embedded, *self._states_after(each, embedded, position_ids, attend))
            states = [all_states[depth] for depth in self.config.exit_layers or []]
        else:
            states = self.hidden_states(input_ids, position_ids, attend)
        if labels is None:
            states = [h_BTD[:, -logits_to_keep:] for h_BTD in states]
        log_w, outputs = self.exit_outputs(states)
        log_p = mixture.log_exit_probs(log_w)
        exit_logits = torch.stack([self.lm_head(o) for o in outputs], dim=-2)
        losses = {} if labels is None else self._losses(log_w, log_p, exit_logits, labels)
        return NviumOutput(
            logits=mixture.log_mixture(log_p, exit_logits),
            exit_probs=log_p.exp(),
            exit_logits=exit_logits if output_exit_logits else None,
            hidden_states=all_states,
            past_key_values=past_key_values,
            last_hidden_state=outputs[-1],
            **losses,
        )

    def _cached_attention(
        self, input_ids: Tensor, attention_mask: Tensor | None, position_ids: Tensor, cache: Cache | None
    ) -> Attend:
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=self.model.embed_tokens.weight.new_empty(*input_ids.shape, 1),
            attention_mask=attention_mask,
            past_key_values=cache,
            position_ids=position_ids,
        )
        assert mask is None or isinstance(mask, Tensor)

        def attend(q_BTHP: Tensor, k_BTGP: Tensor, v_BTGP: Tensor, layer_index: int) -> Tensor:
            q, k, v = (x.transpose(1, 2) for x in (q_BTHP, k_BTGP, v_BTGP))
            if cache is not None:
                k, v = cache.update(k, v, layer_index)
            return dense_attention(q, k, v, mask, is_causal=mask is None and q.shape[2] > 1).transpose(1, 2)

        return attend

    def _losses(self, log_w: Tensor, log_p: Tensor, exit_logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
        targets = labels[:, 1:]
        kept = targets != -100
        log_w, log_p, exit_logits = (x[:, :-1][kept] for x in (log_w, log_p, exit_logits))
        nll_XE = torch.stack([token_nll(logits, targets[kept]) for logits in exit_logits.unbind(-2)], dim=-1)
        mix_loss = mixture.mixture_nll(log_p, nll_XE).mean()
        return {
            "loss": mix_loss,
            "mix_loss": mix_loss,
            "compute_loss": mixture.mean_depth(log_p, self.config.exit_layers or []).mean(),
            "balance_loss": mixture.balance_penalty(log_w).mean(),
            "exit_losses": nll_XE.mean(0),
        }


def generation_config(folder: Path, vocab_size: int) -> GenerationConfig:
    """The folder's generation settings. Raises `CheckpointError` for an end-of-text outside the vocabulary."""
    try:
        read = GenerationConfig.from_pretrained(folder)
        check_end_token_ids(read.eos_token_id, vocab_size)
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{folder / GENERATION_CONFIG_NAME}: {one_line(error)}") from error
    return read


def token_nll(logits_XV: Tensor, targets_X: Tensor) -> Tensor:
    """−log softmax at the target, [X], in float32 or better."""
    precise = logits_XV.to(torch.promote_types(logits_XV.dtype, torch.float32))
    return F.cross_entropy(precise.flatten(0, -2), targets_X.flatten(), reduction="none").view(targets_X.shape)


AutoConfig.register("nvium", NviumConfig)
AutoModel.register(NviumConfig, NviumForCausalLM)
AutoModelForCausalLM.register(NviumConfig, NviumForCausalLM)
