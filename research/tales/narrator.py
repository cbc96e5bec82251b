"""Generate many tales in one batch, each row with its own plot.

The prefill stops at the end of the shortest prompt. After that, rows with longer prompts read the rest of the prompt
token by token, while other rows generate. So all rows always have the same number of tokens, and need no padding or
mask. Finished rows are removed from time to time.

Shapes: B rows, T tokens, S positions, D width, H query heads, G key heads, P head size, V vocabulary, C candidates.
"""

import math
from collections import defaultdict, deque
from dataclasses import dataclass, field
from itertools import chain
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedTokenizerBase

from nvium_core.model.exits import Exit
from nvium_core.model.llama import dense_attention
from nvium_core.model.nvium import Nvium
from nvium_core.model.plan import LayerCall
from research.tales.plots import Plot

SYSTEM = "You tell simple stories."
MIN_PART_TOKENS, ENOUGH, MAX_PART_TOKENS = 8, 20, 64
"""Limits of a part's generated tokens. After `ENOUGH` tokens, the end of a sentence ends the part."""

NGRAM = 5
"""No n-gram of this length may repeat in a tale."""

TEMPERATURE, MIN_P = 0.75, 0.08
"""Sampling parameters of the model's text."""

MAX_POSITIONS = 640
KEPT_ROWS = 0.75
"""The batch is compacted when at most this share of its rows is unfinished."""


@dataclass(frozen=True, slots=True)
class Tale:
    """A tale. `is_whole` is False if a part was cut off. `num_own` counts the tokens that were not forced."""

    text: str
    name: str
    is_whole: bool
    num_tokens: int
    num_own: int


class Punctuation:
    """Sets of tokens that end a sentence, have an odd number of quotation marks, end a part, or are never sampled."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        texts = [str(tokenizer.decode([token])) for token in range(len(tokenizer))]
        self.ends = {token for token, text in enumerate(texts) if text.rstrip('" ')[-1:] in tuple(".!?")}
        self.quotes = {token for token, text in enumerate(texts) if text.count('"') % 2}
        self.breaks = {token for token, text in enumerate(texts) if "\n" in text} | set(tokenizer.all_special_ids)
        strange = {token for token, text in enumerate(texts) if not (text.isascii() and text.isprintable())}
        self.never = strange - self.breaks


@dataclass(kw_only=True, slots=True)
class Row:
    """An unfinished tale. `forced` are the next tokens, which are given and not sampled."""

    forced: deque[int]
    parts: deque[list[int]]
    num_request_tokens: int
    token_ids: list[int] = field(default_factory=list)
    num_own: int = 0
    num_own_in_part: int = 0
    is_quoting: bool = False
    is_whole: bool = True
    followers: defaultdict[tuple[int, ...], set[int]] = field(default_factory=lambda: defaultdict(set))

    @property
    def is_done(self) -> bool:
        return not self.is_whole or not (self.forced or self.parts)

    def banned(self, punctuation: Punctuation) -> set[int]:
        """Return the tokens that would repeat an n-gram or end a part too early."""
        repeated = self.followers.get(tuple(self.token_ids[1 - NGRAM :]), set())
        return repeated | punctuation.breaks if self.num_own_in_part < MIN_PART_TOKENS else repeated

    def next_forced(self) -> int:
        token = self.forced.popleft()
        if self.num_request_tokens:
            self.num_request_tokens -= 1
        else:
            self.append(token)
        return token

    def append(self, token: int) -> None:
        self.followers[tuple(self.token_ids[1 - NGRAM :])].add(token)
        self.token_ids.append(token)

    def choose(self, token: int, punctuation: Punctuation) -> int:
        """Append and return the sampled token. If it ends a part, return the first forced token of the next part."""
        if token in punctuation.breaks:
            self.is_whole = not self.is_quoting and self.token_ids[-1] in punctuation.ends
            self.next_part()
            return self.next_forced()
        self.append(token)
        self.num_own += 1
        self.num_own_in_part += 1
        self.is_quoting ^= token in punctuation.quotes
        if token in punctuation.ends and not self.is_quoting and self.num_own_in_part >= ENOUGH:
            self.next_part()
        elif self.num_own_in_part >= MAX_PART_TOKENS:
            self.is_whole = False
        return token

    def next_part(self) -> None:
        self.num_own_in_part, self.is_quoting = 0, False
        self.forced.extend(self.parts.popleft())


class Memory:
    """The key-value cache of a batch whose rows are all at the same position."""

    def __init__(self, model: Nvium, num_rows: int) -> None:
        config = model.config
        heads, size = config.num_key_value_heads or config.num_attention_heads, config.head_dim or 0
        shape = (2, num_rows, heads, MAX_POSITIONS, size)
        self.layers = [
            torch.empty(shape, dtype=model.dtype, device=model.device) for _ in range(config.num_hidden_layers)
        ]
        self.length = 0

    def attend(self, q_BTHP: Tensor, k_BTGP: Tensor, v_BTGP: Tensor, call: LayerCall) -> Tensor:
        start, end = self.length, self.length + q_BTHP.shape[1]
        keys_BGSP, values_BGSP = self.layers[call.cache]
        keys_BGSP[:, :, start:end] = k_BTGP.transpose(1, 2)
        values_BGSP[:, :, start:end] = v_BTGP.transpose(1, 2)
        if start == 0:
            q_BHTP, k_BGTP, v_BGTP = (x.transpose(1, 2) for x in (q_BTHP, k_BTGP, v_BTGP))
            return dense_attention(q_BHTP, k_BGTP, v_BGTP, call, None).transpose(1, 2)
        rows, num_heads = k_BTGP.shape[0], k_BTGP.shape[2]
        queries = q_BTHP.reshape(rows, num_heads, -1, q_BTHP.shape[-1])  # query heads grouped by key head
        seen = F.scaled_dot_product_attention(queries, keys_BGSP[:, :, :end], values_BGSP[:, :, :end])
        return seen.reshape(q_BTHP.shape)

    def keep(self, rows: list[int]) -> None:
        for index, layer in enumerate(self.layers):  # one at a time, which saves memory
            self.layers[index] = layer[:, rows]


class Narrator:
    def __init__(self, model: Nvium, tokenizer: PreTrainedTokenizerBase) -> None:
        self.model, self.tokenizer = model, tokenizer
        self._last_exit = cast(Exit, model.exits[-1])
        self.punctuation = Punctuation(tokenizer)
        self._never = torch.tensor(sorted(self.punctuation.never), dtype=torch.long, device=model.device)

    @torch.inference_mode()
    def tell(self, plots: list[Plot], seed: int) -> list[Tale]:
        """Generate a tale for each plot."""
        noise = torch.Generator(self.model.device).manual_seed(seed)
        rows = [self._row(plot) for plot in plots]
        active, memory = rows, Memory(self.model, len(rows))
        shortest = min(len(row.forced) for row in rows)
        tokens = [[row.next_forced() for _ in range(shortest)] for row in rows]
        while memory.length + len(tokens[0]) < MAX_POSITIONS:
            h_BD = self._forward(torch.tensor(tokens, device=self.model.device), memory)
            drawn = self._draw([not (row.forced or row.is_done) for row in active], h_BD, active, noise)
            tokens = [[self._next(row, token)] for row, token in zip(active, drawn, strict=True)]
            kept = [index for index, row in enumerate(active) if not row.is_done]
            if not kept:
                break
            if len(kept) <= KEPT_ROWS * len(active):
                memory.keep(kept)
                active, tokens = [active[index] for index in kept], [tokens[index] for index in kept]
        texts = [str(self.tokenizer.decode(row.token_ids)).strip() for row in rows]
        return [
            Tale(text, plot.name, row.is_whole and row.is_done, len(row.token_ids), row.num_own)
            for text, row, plot in zip(texts, rows, plots, strict=True)
        ]

    def _row(self, plot: Plot) -> Row:
        conversation = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": plot.request}]
        request = self.tokenizer.apply_chat_template(conversation, add_generation_prompt=True, return_dict=False)
        opening, *others = plot.parts
        parts = [opening, *(f"\n\n{part}" for part in others)]
        first, *rest = [self.tokenizer(part, add_special_tokens=False).input_ids for part in parts]
        return Row(forced=deque([*request, *first]), parts=deque(rest), num_request_tokens=len(request))

    def _forward(self, tokens_BT: Tensor, memory: Memory) -> Tensor:
        """Run the tokens through all layers. Return the hidden states [B, D] of each row's last token."""
        llama = self.model.model
        h_BTD = llama.embed(tokens_BT)
        positions_T = torch.arange(memory.length, memory.length + tokens_BT.shape[1], device=tokens_BT.device)
        rotary = llama.rotary_emb(positions_T[None], h_BTD.dtype)
        h_BTD = llama.run(h_BTD, chain(*llama.blocks), rotary, memory.attend)
        memory.length += tokens_BT.shape[1]
        return h_BTD[:, -1]

    def _draw(self, wanted: list[bool], h_BD: Tensor, rows: list[Row], noise: torch.Generator) -> list[int]:
        """Sample a token for each row that `wanted` selects. Other rows get −1."""
        chosen = [-1] * len(rows)
        indices = [index for index, is_wanted in enumerate(wanted) if is_wanted]
        if indices:
            logits_BV = self.model.lm_head(self._last_exit.norm(h_BD[indices])).float()
            logits_BV[:, self._never] = -torch.inf
            banned = [
                (place, token) for place, index in enumerate(indices) for token in rows[index].banned(self.punctuation)
            ]
            if banned:
                places, tokens = zip(*banned, strict=True)
                logits_BV[list(places), list(tokens)] = -torch.inf
            for index, token in zip(indices, draw(logits_BV, noise).tolist(), strict=True):
                chosen[index] = token
        return chosen

    def _next(self, row: Row, drawn: int) -> int:
        """Return the row's next input token. The input of a finished row has no effect, so return 0."""
        if row.is_done:
            return 0
        return row.next_forced() if drawn < 0 else row.choose(drawn, self.punctuation)


def draw(logits_BV: Tensor, noise: torch.Generator) -> Tensor:
    """Sample a token for each row [B] by the Gumbel-max trick, over the tokens that min-p keeps."""
    scaled_BV = logits_BV / TEMPERATURE
    floor_B1 = scaled_BV.amax(-1, keepdim=True) + math.log(MIN_P)
    rows_C, tokens_C = (scaled_BV >= floor_B1).nonzero(as_tuple=True)
    kept_C = scaled_BV[rows_C, tokens_C]
    scores_C = kept_C - torch.empty_like(kept_C).exponential_(generator=noise).log()
    best_B = torch.full_like(scaled_BV[:, 0], -torch.inf).scatter_reduce(0, rows_C, scores_C, "amax")
    is_best_C = scores_C == best_B[rows_C]
    return torch.zeros_like(best_B, dtype=torch.long).scatter(0, rows_C[is_best_C], tokens_C[is_best_C])
