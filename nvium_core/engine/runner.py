"""Carries out a Step on the device: gather rows, run one block, ask the junction, keep the hidden states.

Everything a Step needs arrives as flat arrays. A Step never overwrites what it has read before it is sure to succeed,
so one that raised can be run again. All buffers are allocated once.

Shapes: R rows of the Step, F front rows (sequences that may speak), B sequences padded together, Q and S their
longest run of queries and of keys, D width, H query heads, G key heads, P head size, V vocabulary.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import chain, compress

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from nvium_core.engine.randomness import ROUTE, TOKEN, Purpose, uniform
from nvium_core.engine.sampling import NO_TOKEN, Truncation, certified_argmax, draw
from nvium_core.engine.scheduler import Run, Step
from nvium_core.engine.sequence import Sequence
from nvium_core.model.exits import CONTINUE, EXIT
from nvium_core.model.llama import Attend, dense_attention
from nvium_core.model.nvium import NviumForCausalLM

LONG_RUN = 16
"""Runs of more rows attend alone; shorter ones are padded to a common shape and attend together."""


@dataclass(frozen=True, slots=True)
class Junction:
    """What one front row did at the junction: the token it spoke, if any, and the router's log-probabilities."""

    token_id: int | None
    log_exit: float
    log_continue: float


@dataclass(frozen=True)
class AttentionGroup:
    """Runs that attend in one call.

    row_BQ: each query's row in the Step (padding repeats row 0). slot_BS: cache slots of the keys. mask: [B, 1, Q, S],
    True where a query may see a key; None if every query sees every key. sources: flat [B · Q] positions of the real
    queries, in the order of the group's rows. rows: those rows.
    """

    row_BQ: Tensor
    slot_BS: Tensor
    mask: Tensor | None
    sources: Tensor
    rows: Tensor


class Runner:
    def __init__(self, model: NviumForCausalLM, *, num_pages: int, page_size: int, max_sequences: int) -> None:
        self.model = model.eval()
        self.device = model.device
        self.page_size = page_size
        config = model.config
        num_slots = num_pages * page_size
        heads = config.num_key_value_heads or config.num_attention_heads
        self._null_slot = num_slots  # nobody's, always zero: what padding attends to, masked, must not be another's NaN
        cache_shape = (config.num_hidden_layers, num_slots + 1, heads, config.head_dim or 0)
        self._keys = torch.zeros(cache_shape, dtype=model.dtype, device=self.device)
        self._values = torch.zeros_like(self._keys)
        self._hidden = torch.zeros(num_slots, config.hidden_size, dtype=model.dtype, device=self.device)
        self._mixture = torch.zeros(2, max_sequences, config.vocab_size, dtype=torch.float64, device=self.device)
        """The partial mixtures of greedy sequences, by seat. Blocks take turns between the two, so that no Step
        overwrites what it reads."""

    @torch.inference_mode()
    def run(self, step: Step) -> list[Junction | None]:
        """Run the Step; one entry per run, None where the front was not reached."""
        slots_R = self._tensor(list(chain.from_iterable(self._slots(run.sequence, run.rows) for run in step.runs)))
        positions_R = self._tensor(list(chain.from_iterable(run.rows for run in step.runs)))
        h_RD = self._arriving(step, slots_R)
        rotary = self.model.model.rotary(positions_R, h_RD.dtype)
        attend = self._paged_attention(step.runs, slots_R)
        h_RD = self.model.model.run(h_RD, self.model.config.blocks[step.block], rotary, attend)
        junctions = self._ask(step, h_RD)
        self._hidden[slots_R] = h_RD
        return junctions

    def _arriving(self, step: Step, slots_R: Tensor) -> Tensor:
        """The rows' hidden states at the boundary before the block; embeddings before the first."""
        if step.block:
            return self._hidden[slots_R]
        token_ids = [token for run in step.runs for token in run.sequence.token_ids[run.rows.start : run.rows.stop]]
        embedded: Tensor = self.model.model.embed_tokens(self._tensor(token_ids))
        return embedded

    def _slots(self, sequence: Sequence, positions: range) -> list[int]:
        pages, size = sequence.pages, self.page_size
        return [pages[t // size] * size + t % size for t in positions]

    def _paged_attention(self, runs: Items[Run], slots_R: Tensor) -> Attend:
        """Attention of each row over its sequence's cached keys up to itself."""
        groups = self._attention_groups(runs)

        def attend(q_RHP: Tensor, k_RGP: Tensor, v_RGP: Tensor, layer: int) -> Tensor:
            self._keys[layer, slots_R] = k_RGP
            self._values[layer, slots_R] = v_RGP
            out_RHP = torch.empty_like(q_RHP)
            for group in groups:
                out_RHP[group.rows] = self._attend_group(group, q_RHP, layer)
            return out_RHP

        return attend

    def _attend_group(self, group: AttentionGroup, q_RHP: Tensor, layer: int) -> Tensor:
        q_BHQP = q_RHP[group.row_BQ].transpose(1, 2)
        k_BGSP = self._keys[layer, group.slot_BS].transpose(1, 2)
        v_BGSP = self._values[layer, group.slot_BS].transpose(1, 2)
        out_BQHP = dense_attention(q_BHQP, k_BGSP, v_BGSP, group.mask).transpose(1, 2)
        return out_BQHP.flatten(0, 1)[group.sources]

    def _attention_groups(self, runs: Items[Run]) -> list[AttentionGroup]:
        """Long runs alone, short ones padded together."""
        first_row, short, groups = 0, [], []
        for run in runs:
            placed = (run, first_row)
            first_row += len(run.rows)
            if len(run.rows) > LONG_RUN:
                groups.append(self._attention_group([placed]))
            else:
                short.append(placed)
        return groups + ([self._attention_group(short)] if short else [])

    def _attention_group(self, placed_runs: Items[tuple[Run, int]]) -> AttentionGroup:
        rows = [torch.arange(first, first + len(run.rows)) for run, first in placed_runs]
        positions = [torch.arange(run.rows.start, run.rows.stop) for run, _ in placed_runs]
        slots = [torch.tensor(self._slots(run.sequence, range(run.rows.stop))) for run, _ in placed_runs]
        row_BQ = pad_sequence(rows, batch_first=True)
        position_BQ = pad_sequence(positions, batch_first=True)
        slot_BS = pad_sequence(slots, batch_first=True, padding_value=self._null_slot)
        mask_BQS = position_BQ[:, :, None] >= torch.arange(slot_BS.shape[1])
        num_queries = row_BQ.shape[1]
        sources = [torch.arange(len(r)) + b * num_queries for b, r in enumerate(rows)]
        return AttentionGroup(
            row_BQ.to(self.device),
            slot_BS.to(self.device),
            None if bool(mask_BQS.all()) else mask_BQS[:, None].to(self.device),
            torch.cat(sources).to(self.device),
            torch.cat(rows).to(self.device),
        )

    def _ask(self, step: Step, h_RD: Tensor) -> list[Junction | None]:
        """The junction after the block: who exits, and with which token."""
        last_rows = list(accumulate_lengths(step.runs))
        fronts = [(run.sequence, row) for run, row in zip(step.runs, last_rows, strict=True) if run.reaches_front]
        if not fronts:
            return [None] * len(step.runs)
        sequences = [sequence for sequence, _ in fronts]
        spoken = iter(self._speak(step.block, sequences, h_RD[self._tensor([row for _, row in fronts])]))
        return [next(spoken) if run.reaches_front else None for run in step.runs]

    def _speak(self, block: int, sequences: Items[Sequence], h_FD: Tensor) -> list[Junction]:
        exit_ = self.model.exits[block]
        x_FD = exit_.norm(h_FD)
        log_w_F2 = exit_.route(x_FD).double()
        sane_F = log_w_F2.isnan().logical_not().all(-1)
        exits_F = (self._uniforms(block, sequences, ROUTE) < log_w_F2[:, EXIT].exp()) | ~sane_F
        token_F = torch.full_like(exits_F, NO_TOKEN, dtype=torch.long)
        drawn, greedy = exits_F.clone(), self._tensor([s.params.is_greedy for s in sequences])
        drawn &= ~greedy & sane_F
        greedy &= sane_F
        if bool(drawn.any()):
            logits = self.model.lm_head(exit_.adapter(x_FD[drawn]))
            token_F[drawn] = draw(
                logits, self._truncation(sequences)[drawn], self._uniforms(block, sequences, TOKEN)[drawn]
            )
        if bool(greedy.any()):
            logits = self.model.lm_head(exit_.adapter(x_FD[greedy]))
            token_F[greedy], exits_F[greedy] = self._decide(
                block, list(compress(sequences, greedy.tolist())), logits, log_w_F2[greedy]
            )
        spoken = zip(exits_F.tolist(), token_F.tolist(), log_w_F2.tolist(), strict=True)
        return [Junction(token if exits else None, log_w[EXIT], log_w[CONTINUE]) for exits, token, log_w in spoken]

    def _decide(
        self, block: int, sequences: Items[Sequence], logits_RV: Tensor, log_w_R2: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Temperature 0: add this exit's share to the mixture so far; its argmax, and whether it is final."""
        log_reached_R = self._tensor([s.log_reached for s in sequences], torch.float64)
        share_RV = (log_reached_R + log_w_R2[:, EXIT]).exp()[:, None] * logits_RV.double().softmax(-1)
        seats_R = self._tensor([s.seat for s in sequences])
        mixture_RV = share_RV + (self._mixture[(block - 1) % 2, seats_R] if block else 0)
        self._mixture[block % 2, seats_R] = mixture_RV
        token_R, certain_R = certified_argmax(mixture_RV, (log_reached_R + log_w_R2[:, CONTINUE]).exp())
        is_last = block == self.model.config.num_exits - 1
        return token_R, certain_R | is_last

    def _uniforms(self, block: int, sequences: Items[Sequence], purpose: Purpose) -> Tensor:
        return self._tensor(
            [uniform(s.seed, s.params.choice, s.num_tokens - 1, block, purpose) for s in sequences], torch.float64
        )

    def _truncation(self, sequences: Items[Sequence]) -> Truncation:
        params = [s.params for s in sequences]
        return Truncation(
            self._tensor([p.temperature or 1.0 for p in params], torch.float64),
            self._tensor([p.top_k for p in params]),
            self._tensor([p.top_p for p in params], torch.float64),
        )

    def _tensor(self, values: Items[object], dtype: torch.dtype | None = None) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)


def accumulate_lengths(runs: Items[Run]) -> list[int]:
    """Each run's last row in the Step."""
    last, total = [], 0
    for run in runs:
        total += len(run.rows)
        last.append(total - 1)
    return last
