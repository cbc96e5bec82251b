"""Plain decoding of one sequence. The dense model, CALM* and LayerSkip share it, so their times are comparable.

There is a cache for all layers, but there are no batches, pages or schedules. The caller decides which layers a row
passes.

Shapes: R rows of the sequence, S rows of cache, G key/value heads, P head size, D width, V vocabulary.
"""

import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from nvium_core.model.exits import Exit
from nvium_core.model.llama import Attend, Layer, Rotary, dense_attention, rotate
from nvium_core.model.nvium import Nvium


@dataclass(frozen=True)
class Generated:
    """Generated tokens, the number of layers that each passed, and the wall-clock time including prefill."""

    token_ids: list[int]
    exit_layers: list[int]
    seconds: float

    @property
    def milliseconds_per_token(self) -> float:
        return 1000 * self.seconds / len(self.token_ids)


class Decoding:
    """A sequence's tokens and its key-value cache. Running a row again overwrites its keys and values."""

    def __init__(self, model: Nvium, prompt_ids: Sequence[int], max_tokens: int) -> None:
        config, weight = model.config, model.lm_head.weight
        num_rows = len(prompt_ids) + max_tokens
        if not (prompt_ids and max_tokens >= 1 and num_rows <= config.max_position_embeddings):
            raise ValueError(
                f"the prompt ({len(prompt_ids)} tokens) and max_tokens ({max_tokens}) must be at least 1, and together "
                f"at most {config.max_position_embeddings}"
            )
        heads = config.num_key_value_heads or config.num_attention_heads
        shape = (config.num_hidden_layers, heads, num_rows, config.head_dim or 0)
        self.model, self.token_ids = model, list(prompt_ids)
        self.keys_LGSP = torch.empty(shape, dtype=weight.dtype, device=weight.device)
        self.values_LGSP = torch.empty_like(self.keys_LGSP)
        self.rotary = model.model.rotary_emb(torch.arange(num_rows, device=weight.device), weight.dtype)

    @property
    def front(self) -> int:
        """The position of the last token."""
        return len(self.token_ids) - 1

    def read_prompt(self) -> None:
        """Run all rows except the last through all layers."""
        if self.front:
            self.run(self.embed(self.token_ids[:-1]), range(self.model.config.num_hidden_layers), 0)

    def embed(self, token_ids: Sequence[int]) -> Tensor:
        """Embed tokens as rows [R, D]."""
        embedding = self.model.model.embed_tokens
        return embedding(torch.tensor(token_ids, device=embedding.weight.device))

    def run(self, h_RD: Tensor, layers: Iterable[int], first: int) -> Tensor:
        """Run rows through `layers`. The first row has position `first`, the next row `first` + 1, and so on."""
        rows = slice(first, first + len(h_RD))
        return self.model.model.run(h_RD, layers, self._rotary(rows), self._attend(rows))

    def fill(self, h_RD: Tensor, layers: Iterable[int], first: int) -> None:
        """Write keys and values for layers that the rows skip. Each layer computes them from the same `h_RD`."""
        rows = slice(first, first + len(h_RD))
        for index in layers:
            layer = cast(Layer, self.model.model.layers[index])
            x_RD, attention = layer.input_layernorm(h_RD), layer.self_attn
            k_RGP, v_RGP = (
                project(x_RD).unflatten(-1, (-1, attention.head_dim))
                for project in (attention.k_proj, attention.v_proj)
            )
            self._write(rotate(k_RGP, self._rotary(rows)), v_RGP, index, rows)

    def _rotary(self, rows: slice) -> Rotary:
        cos_SP, sin_SP = self.rotary
        return cos_SP[rows], sin_SP[rows]

    def _write(self, k_RGP: Tensor, v_RGP: Tensor, layer_index: int, rows: slice) -> None:
        self.keys_LGSP[layer_index, :, rows] = k_RGP.transpose(0, 1)
        self.values_LGSP[layer_index, :, rows] = v_RGP.transpose(0, 1)

    def _attend(self, rows: slice) -> Attend:
        num_rows = rows.stop - rows.start
        seen_RS = None
        if num_rows > 1:
            device = self.keys_LGSP.device
            seen_RS = torch.ones(num_rows, rows.stop, dtype=torch.bool, device=device).tril(rows.start)

        def attend(q_RHP: Tensor, k_RGP: Tensor, v_RGP: Tensor, layer_index: int) -> Tensor:
            self._write(k_RGP, v_RGP, layer_index, rows)
            k_GSP, v_GSP = (x_LGSP[layer_index, None, :, : rows.stop] for x_LGSP in (self.keys_LGSP, self.values_LGSP))
            return dense_attention(q_RHP.transpose(0, 1)[None], k_GSP, v_GSP, seen_RS)[0].transpose(0, 1)

        return attend


def head_logits(model: Nvium, exit_number: int, h_XD: Tensor) -> Tensor:
    """Return the logits [X, V] of an exit (from 0), in float32 or better."""
    exit_ = cast(Exit, model.exits[exit_number])
    logits_XV: Tensor = model.lm_head(exit_.adapter(exit_.norm(h_XD)))
    return logits_XV.to(torch.promote_types(logits_XV.dtype, torch.float32))


def choose(logits_V: Tensor, rng: random.Random | None) -> int:
    """Return a sampled token if `rng` is given, else the argmax."""
    return int(logits_V.argmax()) if rng is None else draw(logits_V.softmax(-1), rng)


def draw(weights_V: Tensor, rng: random.Random) -> int:
    cumulative_V = weights_V.double().cumsum(-1)
    return int(torch.searchsorted(cumulative_V, rng.random() * cumulative_V[-1], right=True))


@torch.inference_mode()
def generate(model: Nvium, prompt_ids: Sequence[int], max_tokens: int, rng: random.Random | None = None) -> Generated:
    """Generate exactly `max_tokens` tokens through all layers. They are sampled if `rng` is given, else greedy."""
    started = time.perf_counter()
    decoding, depth = Decoding(model, prompt_ids, max_tokens), model.config.num_hidden_layers
    decoding.read_prompt()
    for _ in range(max_tokens):
        h_RD = decoding.run(decoding.embed(decoding.token_ids[-1:]), range(depth), decoding.front)
        decoding.token_ids.append(choose(head_logits(model, -1, h_RD[-1]), rng))
    token_ids = decoding.token_ids[len(prompt_ids) :]
    return Generated(token_ids, [depth] * max_tokens, time.perf_counter() - started)
