"""The N-vium: a Llama backbone with exits that share one head.

The engine, the server and evaluation use this class; `causal_lm` wraps it as a Hugging Face model.

Shapes: B sequences, T tokens, D width, E exits, V vocabulary; X any row dimensions.
"""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GenerationConfig
from transformers.utils import GENERATION_CONFIG_NAME
from transformers.utils.generic import ModelOutput

from nvium_core.errors import CheckpointError, one_line
from nvium_core.model import mixture
from nvium_core.model.checkpoint import EMBEDDING, HEAD, Checkpoint
from nvium_core.model.config import NviumConfig, check_end_token_ids
from nvium_core.model.exits import Exit, Head
from nvium_core.model.llama import Attend, Llama, causal_attention
from nvium_core.model.plan import LayerCall
from nvium_core.model.source import read_source
from nvium_core.model.stored import materialise

HUB_OPTIONS = ("revision", "token", "cache_dir", "local_files_only")


@dataclass
class NviumOutput(ModelOutput):
    """The result of a forward pass. Losses are means over the labelled tokens, or None without labels.

    loss: L_mix, which Trainer minimises.
    logits: log π_mix [B, T, V].
    exit_probs: p_k [B, T, E].
    exit_logits: each exit's own logits [B, T, E, V]. None without `output_exit_logits`.
    mix_loss, compute_loss, balance_loss: L_mix, L_compute and L_balance.
    exit_losses: cross-entropy of each exit alone [E].
    hidden_states: embeddings and output of each layer call, [B, T, D] each. None without
        `output_hidden_states`.
    last_hidden_state: the head's input at the last exit [B, T, D].
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
    past_key_values: Any = None
    last_hidden_state: Tensor | None = None


class Nvium(nn.Module):
    """A model with N exits after the layers `config.exit_layers` and one head W_lm (paper, section 3)."""

    config: NviumConfig
    generation_config: Any = None  # a GenerationConfig or None

    def __init__(self, config: NviumConfig, *for_base: NviumConfig) -> None:
        """Build the model. `for_base`: arguments for the other base class of a subclass, which Python calls next."""
        super().__init__(*for_base)
        self.config = config
        self.model: Llama = Llama(config)
        self.exits = nn.ModuleList(Exit(config, depth == config.num_calls) for depth in config.exit_layers or [])
        self.lm_head = Head(config)
        self.tie()

    def tie(self) -> None:
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    @classmethod
    def from_pretrained(
        cls,
        folder: str | os.PathLike[str],
        *,
        config: NviumConfig | None = None,
        dtype: torch.dtype | Literal["auto"] = "auto",
        exits: str | os.PathLike[str] | None = None,
        is_stored: bool = False,
        **hub_options: Any,
    ) -> Self:
        """Load a folder, Hub name or GGUF file: our layout, the authors' published one, or a Llama or relative.

        exits: folder or Hub name of exits retrofitted to this model.
        is_stored: keep matrices as `StoredMatrix`, which are read-only.

        Raise `CheckpointError` if a tensor is missing, unexpected or of the wrong shape.
        """
        checkpoint, model = cls.read_checked(folder, config, exits, **hub_options)
        precision = checkpoint.dtype if dtype == "auto" else dtype
        read = checkpoint.stored if is_stored else checkpoint.numbers
        tensors = {name: read(name, precision) for name in checkpoint.tensors}
        if checkpoint.config.tie_word_embeddings:
            tensors[HEAD] = tensors[EMBEDDING]
        model.load_state_dict(tensors, assign=True)
        model.tie()
        model.generation_config = generation_config(checkpoint)
        return model.eval()

    @classmethod
    def read_checked(
        cls,
        source: str | os.PathLike[str],
        config: NviumConfig | None,
        exits: str | os.PathLike[str] | None,
        **hub_options: Any,
    ) -> tuple[Checkpoint, Self]:
        """Read a checkpoint and build its model without weights. Raise `CheckpointError` unless all tensors match."""
        checkpoint = read_source(source, config, exits, **hub_options)
        folder, num_layers, count = checkpoint.folder, checkpoint.config.num_hidden_layers, len(checkpoint.tensors)
        if count < num_layers:  # before building any layer
            raise CheckpointError(f"{folder}: num_hidden_layers is {num_layers}, but only {count} tensors")
        try:
            empty = cls.empty(checkpoint.config)
        except Exception as error:  # invalid values raise various exceptions
            raise CheckpointError(f"{folder / 'config.json'}: {one_line(error)}") from error
        checkpoint.check_against(empty)
        return checkpoint, empty

    @classmethod
    def empty(cls, config: NviumConfig) -> Self:
        """Build a model without weights, on the meta device."""
        with torch.device("meta"):
            return cls(config)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move or convert the model. It then has ordinary parameters, because stored matrices are read-only."""
        materialise(self)
        return super()._apply(fn, recurse)

    def num_parameters(self) -> int:
        """Return the number of parameters. A tied head counts once."""
        return sum(weight.numel() for weight in self.parameters())

    @property
    def device(self) -> torch.device:
        return self.lm_head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.lm_head.weight.dtype

    def hidden_states(self, input_ids_BT: Tensor, positions_BT: Tensor, attend: Attend) -> list[Tensor]:
        """Compute the hidden state [B, T, D] at each exit."""
        return self._states_after(self.model.blocks, self.model.embed(input_ids_BT), positions_BT, attend)

    def _states_after(
        self, parts: Iterable[Iterable[LayerCall]], h_BTD: Tensor, positions_BT: Tensor, attend: Attend
    ) -> list[Tensor]:
        """Run consecutive parts of the plan. Return the hidden state after each part."""
        rotary = self.model.rotary_emb(positions_BT, h_BTD.dtype)
        states = []
        for calls in parts:
            h_BTD = self.model.run(h_BTD, calls, rotary, attend)
            states.append(h_BTD)
        return states

    def exit_outputs(self, states: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Compute the routing log w [X, E, 2], and the head's input o_k [X, D] at each exit."""
        log_w, outputs = zip(*(exit_(h_XD) for exit_, h_XD in zip(self.exits, states, strict=True)), strict=True)
        return torch.stack(log_w, dim=-2), list(outputs)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, output_exit_logits: bool = False) -> NviumOutput:
        """Run all layers and exits.

        labels: token ids [B, T]. Labels of −100 are ignored. As in transformers, the labels are shifted here.
        """
        position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        return self.forward_with_attention(input_ids, position_ids, causal_attention(), labels, output_exit_logits)

    def forward_with_attention(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attend: Attend,
        labels: Tensor | None = None,
        output_exit_logits: bool = False,
        output_hidden_states: bool = False,
        logits_to_keep: int = 0,
    ) -> NviumOutput:
        """Like `forward`, with given positions and attention. Keep the last `logits_to_keep` positions; 0 keeps all."""
        position_ids = position_ids.expand_as(input_ids)
        all_states = None
        if output_hidden_states:
            embedded = self.model.embed(input_ids)
            each = [[call] for block in self.model.blocks for call in block]
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
            last_hidden_state=outputs[-1],
            **losses,
        )

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


def generation_config(checkpoint: Checkpoint) -> GenerationConfig | None:
    """Read generation_config.json, if it exists, or a GGUF file's fields. Raise `CheckpointError` if it is invalid."""
    folder = checkpoint.folder
    if checkpoint.sampling:
        return GenerationConfig(**checkpoint.sampling, do_sample=True)
    if not (folder / GENERATION_CONFIG_NAME).exists():
        return None
    try:
        read = GenerationConfig.from_pretrained(folder)
        if read.eos_token_id == -1:  # in some files: none
            read.eos_token_id = None
        check_end_token_ids(read.eos_token_id, checkpoint.config.vocab_size)
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{folder / GENERATION_CONFIG_NAME}: {one_line(error)}") from error
    return read


def token_nll(logits_XV: Tensor, targets_X: Tensor) -> Tensor:
    """Return −log softmax at the targets, [X], in float32 or better."""
    precise = logits_XV.to(torch.promote_types(logits_XV.dtype, torch.float32))
    return F.cross_entropy(precise.flatten(0, -2), targets_X.flatten(), reduction="none").view(targets_X.shape)
