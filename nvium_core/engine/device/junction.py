"""Decisions behind a block: which front rows emit a token, and which.

The router's output comes to the host, and every front is of one of three kinds:
- drawn from exits, it exits if its uniform lets it, with a token from f(π_k);
- at temperature 0, it emits as soon as no later exit can change the argmax of Σ p_k g(π_k);
- drawn from the mixture, it emits at the last exit, from f(π_mix).

Rows of sequences that sample from the original are asked at two exits only. An early one may draft the token behind the
front; the last one draws the tokens behind all rows that reach it, each from the uniform that the draft was drawn from.
A draft is right if it is that token. So what is emitted are the last exit's own draws, whatever was drafted. A drafter,
where the model has one, drafts behind the last of these draws instead, before the next row has passed any block.

Shapes: F front rows, R some of them, D width, V vocabulary.
"""

import time
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Items
from functools import partial
from itertools import compress
from typing import cast

import torch
from torch import Tensor

from nvium_core.engine.device.adjustments import adjust
from nvium_core.engine.device.backend import Backend
from nvium_core.engine.device.partial_mixture import PartialMixtures
from nvium_core.engine.device.sampling import certified_argmax, draw_tokens
from nvium_core.engine.device.scoring import MAX_SCORED_ROWS, scores_of
from nvium_core.engine.events import Score
from nvium_core.engine.schedule.randomness import TOKEN, uniform
from nvium_core.engine.schedule.routed_front import RoutedFront
from nvium_core.engine.schedule.sequence import Sequence
from nvium_core.engine.schedule.step import GOES_ON, NO_TOKEN, FrontDecision, certain
from nvium_core.model.exits import CONTINUE, EXIT, Exit
from nvium_core.model.nvium import NviumForCausalLM

MAX_SUMMED_ROWS = 256
"""Distributions that are summed at once, which bounds the memory of their float64 copies."""

Emitted = dict[int, int]
"""Tokens by the front's row."""


class Junctions:
    """`one_by_one`: a front is never computed beside others, so that its bits do not depend on them."""

    def __init__(
        self, model: NviumForCausalLM, backend: Backend, *, max_sequences: int, one_by_one: bool = False
    ) -> None:
        self._model = model
        self._backend = backend
        self._one_by_one = one_by_one
        self._device = model.device
        self._last_block = model.config.num_exits - 1
        self._mixtures = PartialMixtures(model, max_sequences=max_sequences)
        self.router_seconds = 0.0
        self.head_seconds = 0.0
        """In all so far, draws included."""

    @torch.inference_mode()
    def decide(self, block: int, reached: Mapping[Sequence, float], slots: Items[int]) -> dict[Sequence, FrontDecision]:
        """For each sequence's front, whose hidden state behind the block is in its slot; `reached` is log_reached."""
        if self._one_by_one:
            pairs = zip(reached.items(), slots, strict=True)
            return {sequence: self._decide(block, {sequence: log}, [slot])[0] for (sequence, log), slot in pairs}
        return dict(zip(reached, self._decide(block, reached, slots), strict=True))

    @torch.inference_mode()
    def draft(self, block: int, sequences: Items[Sequence], slots: Items[int]) -> dict[Sequence, FrontDecision]:
        """What an early exit takes for the last exit's token, from the same uniform. A token that would end the
        sequence is not drafted: its front goes on, and so does one that has none."""
        x_FD, _ = self._backend.route(block, slots)
        uniforms = [row_uniform(sequence, sequence.num_tokens - 1) for sequence in sequences]
        tokens = self._backend.draft(block, x_FD, sequences, uniforms)
        return {
            sequence: GOES_ON if token == NO_TOKEN or token in sequence.stop_token_ids else certain(token)
            for sequence, token in zip(sequences, tokens, strict=True)
        }

    @torch.inference_mode()
    def verify(self, rows: Mapping[Sequence, range], slots: Items[int]) -> dict[Sequence, list[int]]:
        """The last exit's own tokens behind the rows in these slots."""
        asked = [(sequence, row) for sequence, own in rows.items() for row in own]
        size = 1 if self._one_by_one else MAX_SUMMED_ROWS
        parts = [slice(first, first + size) for first in range(0, len(asked), size)]
        tokens = iter([token for part in parts for token in self._drawn_by_last(asked[part], slots[part])])
        return {sequence: [next(tokens) for _ in own] for sequence, own in rows.items()}

    def _drawn_by_last(self, asked: list[tuple[Sequence, int]], slots: Items[int]) -> list[int]:
        x_RD, _ = self._backend.route(self._last_block, slots)
        uniforms = [row_uniform(sequence, row) for sequence, row in asked]
        sequences = [sequence for sequence, _ in asked]
        return self._backend.draw(self._last_block, x_RD, range(len(asked)), sequences, uniforms)

    @torch.inference_mode()
    def foresee(
        self, said: Mapping[Sequence, Items[int]], slots: Items[int], num_drafts: int
    ) -> dict[Sequence, list[int]]:
        """What the drafter takes for the last exit's next tokens, from the same uniforms: so many of each sequence, or
        up to one that would end it. `said` is what the last exit has just said, the slots are of the rows that it said
        the last of each behind."""
        drafter, embed = self._model.drafter, self._model.model.embed_tokens
        assert drafter is not None
        drafts: dict[Sequence, list[int]] = {sequence: [] for sequence in said}
        x_FD, _ = self._backend.route(self._last_block, slots)
        tokens = [each[-1] for each in said.values()]
        for ahead in range(num_drafts):
            x_FD = drafter(x_FD, embed(self._tensor([max(token, 0) for token in tokens]))).to(x_FD.dtype)
            rows = [sequence.num_verified + len(each) - 1 + ahead for sequence, each in said.items()]
            tokens = self._backend.draft(self._last_block, x_FD, [*said], [*map(row_uniform, said, rows)])
            for sequence, token in zip(said, tokens, strict=True):
                goes_on = token != NO_TOKEN and token not in sequence.stop_token_ids
                if goes_on and len(drafts[sequence]) == ahead:
                    drafts[sequence].append(token)
        return drafts

    @torch.inference_mode()
    def score(self, slots: Items[int], targets: Items[int], num_top: Items[int]) -> list[Score]:
        """log π_N of a target in each of these slots, whose rows have passed every block, and alternatives."""
        size = 1 if self._one_by_one else MAX_SCORED_ROWS
        parts = [slice(first, first + size) for first in range(0, len(slots), size)]
        return [score for part in parts for score in self._scored(slots[part], targets[part], num_top[part])]

    def _scored(self, slots: Items[int], targets: Items[int], num_top: Items[int]) -> Iterator[Score]:
        x_RD, _ = self._backend.route(self._last_block, slots)
        log_RV = self._backend.logits(self._last_block, x_RD).log_softmax(-1)
        certain_RE = log_RV.new_zeros(len(slots), self._last_block + 1)
        certain_RE[:, -1] = 1
        return scores_of(log_RV, certain_RE, targets, num_top)

    def _decide(self, block: int, reached: Mapping[Sequence, float], slots: Items[int]) -> list[FrontDecision]:
        started = time.perf_counter()
        x_FD, log_w = self._backend.route(block, slots)
        routed = time.perf_counter()
        fronts = [
            RoutedFront(sequence, row, block, log_reached, log_w[row][EXIT], log_w[row][CONTINUE])
            for row, (sequence, log_reached) in enumerate(reached.items())
        ]
        emitted = self._emitted(fronts, block, x_FD)
        self.router_seconds += routed - started
        self.head_seconds += time.perf_counter() - routed
        return [FrontDecision(emitted.get(front.row), front.log_exit, front.log_continue) for front in fronts]

    def _emitted(self, fronts: list[RoutedFront], block: int, x_FD: Tensor) -> Emitted:
        sane = [front for front in fronts if front.is_sane]
        drawing = [front for front in sane if not front.sequence.draw.is_summed and front.exits]
        summing = [front for front in sane if front.sequence.draw.is_summed]
        emitted = {front.row: NO_TOKEN for front in fronts if not front.is_sane}
        if drawing:
            rows, sequences = [front.row for front in drawing], [front.sequence for front in drawing]
            uniforms = [front.uniform(TOKEN) for front in drawing]
            emitted |= zip(rows, self._backend.draw(block, x_FD, rows, sequences, uniforms), strict=True)
        if summing:
            adapter = cast(Exit, self._model.exits[block]).adapter
            o_RD = adapter(x_FD[self._tensor([front.row for front in summing])].to(self._model.dtype))
            exit_prob_R = self._float64([front.exit_probability for front in summing])
            self._mixtures.keep(block, self._seats(summing), o_RD, exit_prob_R)
            emitted |= self._emitted_by_mixture(summing)
        return emitted

    def _emitted_by_mixture(self, fronts: list[RoutedFront]) -> Emitted:
        """Compute the head for those whose mixture may decide now, in portions of bounded memory."""
        block = fronts[0].block
        is_last = block == self._last_block
        drawing = [front for front in fronts if samples_mixture(front) and is_last]
        deciding = [front for front in fronts if not samples_mixture(front) and (is_last or front.may_be_certain)]
        emitted: Emitted = {}
        for portion in portions(deciding, block + 1):
            emitted |= self._certain(portion, block)
        for portion in portions(drawing, block + 1):
            emitted |= self._drawn_from_mixture(portion)
        return emitted

    def _certain(self, fronts: list[RoutedFront], block: int) -> Emitted:
        """Temperature 0: the argmax of m_k where that is final."""
        g = partial(adjust, sequences=[front.sequence for front in fronts])
        mixture_RV = self._mixtures.sum(block, self._seats(fronts), g)
        token_R, certain_R = certified_argmax(mixture_RV, self._float64([front.remaining for front in fronts]))
        is_final = certain_R.tolist() if block < self._last_block else [True] * len(fronts)
        return dict(compress(by_row(fronts, token_R.tolist()), is_final))

    def _drawn_from_mixture(self, fronts: list[RoutedFront]) -> Emitted:
        """A token from f(π_mix) for each row, with log π_mix in place of logits."""
        sequences = [front.sequence for front in fronts]
        log_mixture_RV = self._mixtures.sum(self._last_block, self._seats(fronts)).log()
        adjust(log_mixture_RV, sequences)
        uniforms = [front.uniform(TOKEN) for front in fronts]
        return dict(by_row(fronts, draw_tokens(log_mixture_RV, [each.draw for each in sequences], uniforms)))

    def _seats(self, fronts: list[RoutedFront]) -> Tensor:
        return self._tensor([front.sequence.seat or 0 for front in fronts])

    def _tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, device=self._device)

    def _float64(self, values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=self._device)


def row_uniform(sequence: Sequence, row: int) -> float:
    """For the token behind a row, whichever exit draws it, and however many there are."""
    return uniform(sequence.seed, sequence.choice, row, 0, TOKEN)


def samples_mixture(front: RoutedFront) -> bool:
    """f is applied to π_mix, which takes all exits."""
    return front.sequence.params.sampling == "mixture"


def portions(fronts: list[RoutedFront], num_exits: int) -> Iterator[list[RoutedFront]]:
    """The fronts, so many at a time that their exits have a bounded number of distributions."""
    size = max(1, MAX_SUMMED_ROWS // num_exits)
    return (fronts[start : start + size] for start in range(0, len(fronts), size))


def by_row(fronts: list[RoutedFront], tokens: list[int]) -> Iterator[tuple[int, int]]:
    return zip([front.row for front in fronts], tokens, strict=True)
