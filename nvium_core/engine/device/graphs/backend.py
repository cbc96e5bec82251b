"""Runs Steps as CUDA graphs on fixed buffers: one copy of the inputs, one graph, one copy of the results.

There is one graph per block with its decisions, and one for a pass through all blocks, for each power of two of rows.
While the host waits for the tokens of a pass, the device already runs the next pass, which reads the tokens in device
memory. If the sequences have ended, this pass is harmless: it writes only rows after their last rows, and such rows
are always written before they are read. Long runs and Steps with very many changed logits use `LayersBackend`.

Shapes: R rows, with padding.
"""

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from nvium_core.engine.device.attention import (
    CHECK_TOLERANCE,
    MAX_GATHERED_KEYS,
    TRITON_TYPES,
    RowAttention,
    best_attention,
    best_ragged,
    gathered,
    power_of_two,
    works,
    written,
)
from nvium_core.engine.device.decide import EMITTED, EXIT_TAKEN, NUM_ANSWERS, decide
from nvium_core.engine.device.graphs.replay import Fence, Replay
from nvium_core.engine.device.inputs import MAX_FRONTS, Front, Variant
from nvium_core.engine.device.layers.backend import Fronts, LayersBackend, Progress, record_answers
from nvium_core.engine.device.paged_cache import PagedCache
from nvium_core.engine.events import StepReport
from nvium_core.engine.params import EngineConfig
from nvium_core.engine.schedule.policies import policies_of
from nvium_core.engine.schedule.scheduler import MAX_SHORT_RUN_ROWS
from nvium_core.engine.schedule.step import NO_TOKEN, Rows, Step
from nvium_core.model.llama import Attend
from nvium_core.model.nvium import Nvium

if TYPE_CHECKING:
    from nvium_core.engine.device.fused.passes import FusedPass

logger = logging.getLogger(__name__)

TOKENS_AHEAD = 8
MAX_ROWS = MAX_FRONTS
MIN_CHANGES, MAX_CHANGES = 64, 4096

MIN_WIDTH, WIDTH_RATIO = 8, 4  # captured page-table widths for gathered attention: 8, 32, 128, … pages


@dataclass
class HostBuffers:
    """Inputs and answers of a pass in host memory. The device reaches `fence` when it has copied the answers."""

    inputs: Tensor
    answers: Tensor
    fence: Fence


class Flight(NamedTuple):
    """A pass in flight: the buffers that receive its answers, its front rows, its blocks, its rows and their pages."""

    buffers: HostBuffers
    fronts: Fronts
    blocks: range
    rows: list[Rows]
    pages: list[list[int]]

    def computes(self, blocks: range, rows: list[Rows]) -> bool:
        """Whether it is the pass of these rows. A sequence that has lost its pages has another list of pages."""
        is_alike = self.blocks == blocks and self.rows == rows
        return is_alike and all(own.sequence.pages is pages for own, pages in zip(rows, self.pages, strict=True))


class GraphsBackend(LayersBackend):
    tokens_ahead = TOKENS_AHEAD

    def __init__(
        self,
        model: Nvium,
        cache: PagedCache,
        *,
        make_fence: Callable[[torch.device], Fence] = Fence,
        is_fused: bool | None = None,
        attention: RowAttention | None = None,
    ) -> None:
        """`is_fused`: use Triton's kernels; None does so if they agree with the layers on this device."""
        super().__init__(model, cache)
        with torch.no_grad():
            model.model.pack()
            for exit_ in model.exits[:-1]:
                exit_.router.to(torch.promote_types(model.dtype, torch.float32))  # convert once, not in every call
        config, device = model.config, cache.keys.device
        self.attention = attention or best_attention(cache, config.num_attention_heads)
        self._attend_runs = best_ragged(cache, config.num_attention_heads)
        max_pages = -(-min(config.max_position_embeddings, cache.null_slot) // cache.page_size)
        is_gathered = self.attention is gathered
        self.widths = widths(max_pages) if is_gathered else [max_pages]
        self._max_table = MAX_GATHERED_KEYS // cache.page_size if is_gathered else MAX_ROWS * max_pages
        largest = Variant(MAX_ROWS, max_pages, MAX_CHANGES, has_masks=True)
        self._buffer = torch.zeros(self.inputs.num_words(largest), dtype=torch.long, device=device)
        self.answers = torch.zeros(NUM_ANSWERS, MAX_ROWS, dtype=torch.float64, device=device)
        self._previous = torch.zeros(MAX_ROWS, dtype=torch.float64, device=device)
        """Tokens that the previous pass emitted."""
        self.host_buffers = [
            HostBuffers(
                torch.zeros(len(self._buffer), dtype=torch.long, pin_memory=device.type == "cuda"),
                torch.zeros(NUM_ANSWERS, MAX_ROWS, dtype=torch.float64, pin_memory=device.type == "cuda"),
                make_fence(device),
            )
            for _ in range(2)
        ]
        self._carried: Flight | None = None
        """A pass that the last Step has left in flight, so that the device is busy while the host schedules."""
        self.replay = Replay(device)
        self._fused: FusedPass | None = None
        if is_fused or (is_fused is None and self.replay.captures and cache.keys.dtype in TRITON_TYPES):
            is_used = works("the fused pass in Triton", self._fuse)
            self._fused = self._fused if is_fused or is_used else None

    @property
    def instructions(self) -> str | None:
        return "graphs" if self.replay.captures and None not in self.replay.graphs.values() else None

    @torch.inference_mode()
    def prepare(self, config: EngineConfig) -> None:
        """Capture graphs with and without top-k or top-p. The largest is first: the others reuse its memory."""
        if not self.replay.captures:
            return
        policies = policies_of(config.schedule, self.num_blocks)
        parts = [blocks for policy in policies for blocks in policy.passes(range(self.num_blocks))]
        powers = reversed(range(power_of_two(min(config.max_sequences, MAX_ROWS)).bit_length()))
        sizes = [Variant(1 << power, width) for power in powers for width in self.widths]
        variants = [size._replace(is_ranked=ranked) for size in sizes if self._fits(size) for ranked in (True, False)]
        started, free = time.monotonic(), free_memory(self.cache.keys.device)
        logger.info("capturing %d CUDA graphs", len(variants) * len(parts))
        for variant in variants:
            for blocks in parts:
                self._send(variant, [], [])
                self.host_buffers[0].fence.set()
                self.replay.capture((blocks, variant), partial(self.forward_and_decide, blocks, variant))
        used = (free - free_memory(self.cache.keys.device)) / 1e6
        logger.info("captured CUDA graphs in %.1f s, using %.0f MB", time.monotonic() - started, used)

    def _fuse(self) -> bool:
        """Build the fused pass. Return whether its states and answers agree with the layers', on padding rows."""
        from nvium_core.engine.device.fused.passes import FusedPass  # noqa: PLC0415 (needs Triton)

        fused, states = FusedPass(self.model, self.cache, self.attention), self.cache.states_NSD
        variant, found = Variant(2, self.widths[0]), list[tuple[Tensor, Tensor]]()
        with torch.inference_mode():
            for self._fused in (None, fused):
                self._send(variant, [], [])
                self.host_buffers[0].fence.set()
                self.forward_and_decide(range(self.num_blocks), variant)
                found.append((states[:, self.cache.padding_slot].clone(), self.answers[EXIT_TAKEN, :2].clone()))
                states[:, self.cache.padding_slot] = 0
        (expected, exits), (own, own_exits) = found
        tolerance = CHECK_TOLERANCE * float(expected.abs().max())
        return torch.allclose(own, expected, rtol=0, atol=tolerance) and torch.equal(own_exits, exits)

    def pass_blocks(self, step: Step, blocks: range, parts: list[Progress]) -> Iterable[StepReport]:
        """Run passes until a run's limit, the time budget or a stop token.

        Each pass is launched before the answers of the previous pass are read. If a run may emit several tokens, the
        last pass stays in flight, and is the first of the next Step if that has the same rows.
        """
        started, num_passes = time.perf_counter(), 1
        rows, fronts = [part.rows(blocks[-1]) for part in parts], self.fronts(blocks, parts)
        flight = self._carried
        if flight is not None and flight.computes(blocks, rows):
            flight, self._carried = flight._replace(fronts=fronts), None
        else:
            flight = self._launch(blocks, rows, fronts)
        if flight is None:
            return super().pass_blocks(step, blocks, parts)
        may_run_ahead = len(blocks) == self.num_blocks and all(part.run.sequence.changes is None for part in parts)
        limit = min(part.run.limit for part in parts) if may_run_ahead else 1
        while True:
            ahead = self._launch_ahead(blocks, parts, num_passes) if num_passes < limit else None
            is_over = self._take_answers(flight)
            if ahead is None or is_over:
                break
            if num_passes + 1 == limit or time.perf_counter() - started >= step.seconds:
                self._carried = ahead
                break
            flight, num_passes = ahead, num_passes + 1
        for part in parts:
            part.pass_rows(blocks, part.run.stop + num_passes - 1)
        num_rows = sum(len(own.rows) for own in rows) + (num_passes - 1) * len(parts)
        seconds = (time.perf_counter() - started) / len(blocks)
        return [StepReport(block + 1, num_passes, num_rows, seconds) for block in blocks]

    def attend(self, rows: Items[Rows], slot_R: Tensor) -> Attend:
        return written(self.cache, slot_R, self._attend_runs(self.cache, rows))

    def _launch_ahead(self, blocks: range, parts: list[Progress], num_passes: int) -> Flight | None:
        last = [part.run.stop - 1 + num_passes for part in parts]
        rows = [Rows(part.run.sequence, range(row, row + 1)) for part, row in zip(parts, last, strict=True)]
        fronts = [(part, self._front(part, row)) for part, row in zip(parts, last, strict=True)]
        return self._launch(blocks, rows, fronts, is_ahead=True)

    def _launch(self, blocks: range, rows: list[Rows], fronts: Fronts, *, is_ahead: bool = False) -> Flight | None:
        """Launch a pass. Return None if no graph fits the rows or their changed logits."""
        own = [front for _, front in fronts]
        variant = self._padded(rows, self.inputs.variant(own, is_last=blocks.stop == self.num_blocks))
        if variant is None:
            return None
        self._carried = None  # the next pass overwrites the answers from which this pass's successor would read
        self.host_buffers.reverse()
        host = self.host_buffers[0]
        self._send(variant, rows, own, is_ahead=is_ahead)
        self._previous.copy_(self.answers[EMITTED])
        self.replay.run((blocks, variant), partial(self.forward_and_decide, blocks, variant))
        host.answers.copy_(self.answers, non_blocking=True)
        host.fence.set()
        return Flight(host, fronts, blocks, rows, [own.sequence.pages for own in rows])

    def _send(self, variant: Variant, rows: Items[Rows], fronts: Items[Front], *, is_ahead: bool = False) -> None:
        host = self.host_buffers[0]
        host.fence.wait()  # wait until the device has read this buffer's previous inputs
        words = self.inputs.write(host.inputs, variant, rows, fronts, is_ahead=is_ahead)
        self._buffer[: len(words)].copy_(words, non_blocking=True)

    def _padded(self, rows: Items[Rows], variant: Variant) -> Variant | None:
        """Return the variant, padded to a captured size. Return None if rows or changed logits are too many."""
        num_rows, num_changes = sum(len(own.rows) for own in rows), variant.num_changes
        if num_rows > MAX_ROWS or num_changes > MAX_CHANGES or max(len(own.rows) for own in rows) > MAX_SHORT_RUN_ROWS:
            return None
        num_pages = -(-max(own.rows.stop for own in rows) // self.cache.page_size)
        padded = variant._replace(
            num_rows=power_of_two(num_rows),
            num_pages=self.widths[bisect_left(self.widths, num_pages)],
            num_changes=max(MIN_CHANGES, power_of_two(num_changes)) if num_changes else 0,
        )
        return padded if self._fits(padded) else None

    def _fits(self, variant: Variant) -> bool:
        return variant.num_rows * variant.num_pages <= self._max_table

    def _take_answers(self, flight: Flight) -> bool:
        """Wait for a pass and apply its decisions. Return True if a sequence has ended, so the Step must end."""
        flight.buffers.fence.wait()
        record_answers(flight.fronts, flight.buffers.answers)
        return any(
            emission.token_id == NO_TOKEN or emission.token_id in part.run.sequence.stop_token_ids
            for part, _ in flight.fronts
            for emission in part.emissions[-1:]
        )

    def forward_and_decide(self, blocks: range, variant: Variant) -> None:
        """Compute the answers from the inputs in the buffer. CUDA graphs capture this function."""
        inputs, backbone = self.inputs.views(self._buffer, variant), self.model.model
        if self._fused is not None:
            self._fused.run(blocks, inputs, self._previous, self.answers, variant)
            return
        slot_R, position_R, source_R = (inputs.rows[name] for name in ("slot", "position", "source"))
        if blocks.start:
            h_RD = self.cache.states_NSD[blocks.start - 1, slot_R]
        else:
            emitted_R = self._previous[source_R.clamp(min=0)].clamp(min=0).long()
            h_RD = backbone.embed_tokens(torch.where(source_R < 0, inputs.rows["token"], emitted_R))
        attend = written(self.cache, slot_R, self.attention(self.cache, inputs.table_RW, position_R))
        rotary = backbone.rotary_emb(position_R, h_RD.dtype)
        for block in blocks:
            h_RD = backbone.run(h_RD, self.model.config.blocks[block], rotary, attend)
            self.cache.states_NSD[block, slot_R] = h_RD
        self.answers[:, : variant.num_rows] = decide(self.model, self.cache.states_NSD, blocks, inputs, variant)


def widths(max_pages: int) -> list[int]:
    """Return the page-table widths to capture, in pages. The last width is `max_pages`."""
    found = [MIN_WIDTH]
    while found[-1] < max_pages:
        found.append(found[-1] * WIDTH_RATIO)
    return [*found[:-1], max_pages]


def free_memory(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
