"""Carries out a Step on the device: run one block, ask the junction, score what is to be scored.

A Step never overwrites what it has read, so one that raised can be run again. All buffers are allocated once.

Shapes: S cache slots, and rows to score; D width.
"""

from collections.abc import Sequence as Items
from typing import NamedTuple

import torch

from nvium_core.engine.device import native
from nvium_core.engine.device.graphs import StaticSteps
from nvium_core.engine.device.junction import Answered, Junction, Junctions
from nvium_core.engine.device.layers.attention import PagedAttention
from nvium_core.engine.device.layers.blocks import PlainBlocks
from nvium_core.engine.device.layers.exits import Exits, PlainExits
from nvium_core.engine.device.layers.fixed_order import FixedSplitAttention, tile_size, tiles
from nvium_core.engine.device.scoring import Ledger
from nvium_core.engine.events import Score
from nvium_core.engine.schedule.kv_cache import slots
from nvium_core.engine.schedule.scheduler import Step
from nvium_core.engine.schedule.sequence import Sequence
from nvium_core.model.nvium import NviumForCausalLM

SCORES_AT_ONCE = 32
"""Rows that are scored together."""


class Outcome(NamedTuple):
    """What came of a run: the junction's answer if the front was reached, and scores if any were wanted."""

    junction: Junction | None
    scores: Items[Score] = ()


class Ran(NamedTuple):
    """A Step that was run, with an outcome for each of its runs, or what it failed with.

    `seconds` are None where nobody took them.
    """

    step: Step
    outcomes: list[Outcome | Exception]
    seconds: float | None = None


class Runner:
    """`is_deterministic`: rows come out bit for bit the same whatever else runs, at the cost of speed.

    `is_native`: short runs are carried, and fronts asked, in native calls, which is for a CPU. `is_static`: Steps of
    few rows are, over fixed buffers, which is for a GPU.
    """

    def __init__(
        self,
        model: NviumForCausalLM,
        *,
        num_pages: int,
        page_size: int,
        max_sequences: int,
        is_deterministic: bool = False,
    ) -> None:
        self._model = model.eval()
        self._page_size = page_size
        weight = model.lm_head.weight
        paged = FixedSplitAttention if is_deterministic else PagedAttention
        self._attention = attention = paged(model.config, num_pages=num_pages, page_size=page_size, like=weight)
        self._states_2SD = weight.new_zeros(2, attention.num_slots, model.config.hidden_size)
        self._is_deterministic = is_deterministic
        self._native = self._native_steps(max_sequences) if native.knows(model) else None
        self._tile_size = tile_size(model) if is_deterministic and self._native is None else 0
        self._blocks = PlainBlocks(model, attention, self._states_2SD, tile_size=self._tile_size)
        exits: Exits = PlainExits(model, self._states_2SD)
        if self._native is not None:
            exits = native.NativeExits(model, self._states_2SD, self._native.exits)
        self._junctions = Junctions(model, exits, max_sequences=max_sequences)
        self._static = self._static_steps() if weight.is_cuda and not is_deterministic else None
        rows_at_once = 1 if is_deterministic else SCORES_AT_ONCE
        self._ledger = Ledger(model, max_sequences=max_sequences, rows_at_once=rows_at_once)

    def run(self, step: Step) -> list[Ran]:
        """Run the Step, and those that follow it as far as that costs no coming back."""
        return [Ran(each, self._outcomes(each, answers), seconds) for each, answers, seconds in self._carry(step)]

    @property
    def is_native(self) -> bool:
        return self._native is not None

    @property
    def chooses_path(self) -> bool:
        """Whether long runs may be carried either way, so that calibration can find the faster one."""
        return self.is_native and not self._is_deterministic

    @property
    def longest_native(self) -> int:
        """Rows of one sequence that are carried in a native call; 0 where nothing is."""
        return self._native.longest if self._native else 0

    @longest_native.setter
    def longest_native(self, num_rows: int) -> None:
        assert self._native is not None
        self._native.longest = num_rows

    def _native_steps(self, max_sequences: int) -> native.NativeSteps:
        """Where bits matter they carry everything: what a row comes to does not depend on its company there."""
        steps = native.NativeSteps(self._model, self._attention, self._states_2SD, max_sequences=max_sequences)
        if self._is_deterministic:
            steps.longest = native.ANY_LENGTH
        return steps

    def _static_steps(self) -> StaticSteps:
        return StaticSteps(self._model, self._attention, self._states_2SD)

    @property
    def is_static(self) -> bool:
        return self._static is not None

    def _carry(self, step: Step) -> list[Answered]:
        """Take the rows through the block; fronts are answered where that is part of it."""
        if self._native is not None and self._native.suits(step):
            return self._native.run(step)
        if self._static is not None and self._static.suits(step):
            return [Answered(step, self._static.run(step))]
        self._carry_through_layers(step)
        return [Answered(step, {})]

    @torch.inference_mode()
    def _carry_through_layers(self, step: Step) -> None:
        """In tiles where bits matter."""
        for part in tiles(step, self._tile_size) if self._tile_size else [step]:
            self._blocks.carry(part)

    def _outcomes(self, step: Step, answers: dict[Sequence, Junction]) -> list[Outcome | Exception]:
        self._ask(step, answers)
        junctions = [answers.get(run.sequence) for run in step.runs]
        if not any(run.sequence.needs_logprobs for run in step.runs):
            return [Outcome(junction) for junction in junctions]
        return [Outcome(*outcome) for outcome in zip(junctions, self._score(step, junctions), strict=True)]

    def _ask(self, step: Step, answers: dict[Sequence, Junction]) -> None:
        """The junction, for the runs that reached their fronts and have no answer yet."""
        asked = [run for run in step.runs if run.reaches_front and run.sequence not in answers]
        if asked:
            sequences = [run.sequence for run in asked]
            own_slots = [slot for run in asked for slot in slots(run.sequence, run.rows[-1:], self._page_size)]
            answers |= zip(sequences, self._answers(step.block, sequences, own_slots), strict=True)

    @torch.inference_mode()
    def _answers(self, block: int, sequences: Items[Sequence], own_slots: Items[int]) -> list[Junction]:
        """All fronts together, or where the bits matter one by one."""
        if not self._is_deterministic:
            return self._junctions.ask(block, sequences, own_slots)
        alone = zip(sequences, own_slots, strict=True)
        return [answer for sequence, slot in alone for answer in self._junctions.ask(block, [sequence], [slot])]

    @torch.inference_mode()
    def _score(self, step: Step, junctions: Items[Junction | None]) -> list[list[Score]]:
        """Scores, if this was the last block; else what they will need is kept."""
        wanted = [(run.sequence, run.sequence.rows_to_score(run.rows)) for run in step.runs]
        if not any(rows for _, rows in wanted):
            return [[] for _ in step.runs]
        own_slots = [slot for sequence, rows in wanted for slot in slots(sequence, rows, self._page_size)]
        h_SD = self._states_2SD[(step.block + 1) % 2, torch.tensor(own_slots, device=self._states_2SD.device)]
        if step.block == self._model.config.num_exits - 1:
            answers = [junction.token_id or 0 for junction in junctions if junction is not None]
            return self._ledger.score(step, h_SD, [max(token, 0) for token in answers])  # NO_TOKEN is not told
        self._ledger.keep(step, h_SD)
        return [[] for _ in step.runs]
