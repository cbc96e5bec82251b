"""Runs Steps as CUDA graphs on fixed buffers: one copy of the inputs, one graph, one copy of the results.

There is one graph for a pass through all blocks. A pass through one block has two: the layers with the routers, and the
draw, which is skipped if no front row exits. Each is captured for several numbers of rows, with and without mixtures
and changed logits, before the first request. A pass runs the smallest captured graph that includes what it needs.
While the host waits for the tokens of a Step, the device already has the pass of the next one, which reads the tokens
in device memory. A pass for a sequence that has ended does no harm: it writes only beyond the sequence's last row, and
whoever gets such a page writes the rows before reading them. The layers of long runs are PyTorch's operators, and so
are Steps with very many changed logits.

Shapes: R rows, with padding.
"""

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Items
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import islice, product
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from nvium_core.engine.device.attention import (
    CHECK_TOLERANCE,
    TRITON_TYPES,
    RunAttention,
    best_attention,
    best_ragged,
    works,
    written,
)
from nvium_core.engine.device.decide import EMITTED, EXIT_TAKEN, GOES_ON, NUM_ANSWERS
from nvium_core.engine.device.graphs.replay import Fence, Replay
from nvium_core.engine.device.inputs import MAX_FRONTS, Front, InputViews, Variant
from nvium_core.engine.device.layers.backend import LayersBackend, Progress, record_answers
from nvium_core.engine.device.paged_cache import PagedCache
from nvium_core.engine.events import StepReport
from nvium_core.engine.params import EngineConfig, SamplingParams
from nvium_core.engine.schedule.policies import WHOLE, policies_of
from nvium_core.engine.schedule.scheduler import MAX_SHORT_RUN_ROWS
from nvium_core.engine.schedule.sequence import Sequence
from nvium_core.engine.schedule.step import Rows, Run, Step
from nvium_core.model.llama import Attend
from nvium_core.model.nvium import Nvium

logger = logging.getLogger(__name__)

MAX_ROWS = MAX_FRONTS
POWERS = [1 << power for power in range(MAX_ROWS.bit_length())]
SIZES = sorted({*POWERS, *range(16, MAX_ROWS + 1, 16)})
"""Numbers of rows of the captured graphs of plain requests. Other kinds of requests have powers of two."""

CAPTURE_SECONDS = 20.0
"""Time for capturing. Passes whose graph is then missing run a larger one."""


class Layers(Protocol):
    def run(self, blocks: range, inputs: InputViews, previous_R: Tensor) -> None:
        """Compute the states of the rows after each of these blocks. `previous`: the tokens of the previous pass."""


class Decisions(Protocol):
    """The functions of `decide`, in one call or in two."""

    def decide(self, blocks: range, inputs: InputViews, variant: Variant, answers_4F: Tensor) -> None:
        """Write `decide`'s answers."""

    def route(self, blocks: range, inputs: InputViews, answers_4F: Tensor) -> None:
        """Write the answers, except the tokens, of fronts that no mixture decides."""

    def draw(self, blocks: range, inputs: InputViews, variant: Variant, answers_4F: Tensor) -> None:
        """Write the tokens of the fronts for which `route` has just chosen an exit."""


@dataclass
class HostBuffers:
    """Inputs and answers of a pass in host memory. The device reaches `fence` when it has copied the answers."""

    inputs: Tensor
    answers: Tensor
    fence: Fence


PASS, DECIDE, ROUTE, DRAW = "pass", "decisions", "layers and routers", "draw"


class Graph(NamedTuple):
    """What a CUDA graph computes: layers and decisions, layers and routers, or the draw that follows the routers.

    `DECIDE` is not captured. It follows layers that ran in PyTorch's operators.
    """

    part: str
    blocks: range
    variant: Variant


class Flight(NamedTuple):
    """A pass in flight.

    `buffers` receive its answers, and `rows` has the rows and pages of each sequence. `draw` is the graph that draws,
    if it is not part of the pass.
    """

    buffers: HostBuffers
    fronts: list[Front]
    blocks: range
    rows: dict[Sequence, tuple[range, list[int]]]
    draw: Graph | None

    def computes(self, blocks: range, rows: Items[Rows]) -> bool:
        """Whether the pass has these rows. A sequence that has lost its pages has another list of pages."""
        found = ((*self.rows.get(sequence, (None, None)), own, sequence.pages) for sequence, own in rows)
        return self.blocks == blocks and all(known == own and held is pages for known, held, own, pages in found)


class GraphsBackend(LayersBackend):
    launches_ahead = True
    max_changes = 65_536

    def __init__(
        self,
        model: Nvium,
        cache: PagedCache,
        layers: Layers,
        decisions: Decisions,
        attend_runs: RunAttention,
        make_fence: Callable[[torch.device], Fence] = Fence,
    ) -> None:
        """`attend_runs`: attention of runs that are too long for the graphs."""
        super().__init__(model, cache)
        self._layers, self._decisions, self._attend_runs = layers, decisions, attend_runs
        config, device = model.config, cache.keys.device
        num_pages = -(-min(config.max_position_embeddings, cache.null_slot) // cache.page_size)
        self.variants = sorted(variants(num_pages, self.max_changes, has_exits=self.num_blocks > 1))
        """The graphs to choose from, the cheapest first."""
        self._buffer = torch.zeros(self.inputs.num_words(self.variants[-1]), dtype=torch.long, device=device)
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
        self._ahead: Flight | None = None
        """The next Step's pass. The last Step has launched it, so that the device is busy while the host schedules."""
        self.replay = Replay(device)

    @property
    def instructions(self) -> str | None:
        return "graphs" if self.replay.captures and self.variants else None

    @torch.inference_mode()
    def prepare(self, config: EngineConfig) -> None:
        """Capture the graphs, first the one that includes all others: these reuse its memory."""
        if not self.replay.captures:
            return
        started, free = time.monotonic(), free_memory(self.cache.keys.device)
        num_rows = config.bounds("cuda").sequences * MAX_SHORT_RUN_ROWS
        most = next((size for size in POWERS if size >= num_rows), MAX_ROWS)
        *others, largest = [variant for variant in self.variants if variant.num_rows <= most]
        wanted, captured = [largest, *sorted(others, key=lambda variant: variant[2:])], list[Variant]()
        policies = policies_of(config.schedule, self.num_blocks)
        parts = [blocks for policy in policies for blocks in policy.passes(range(self.num_blocks))]
        logger.info("capturing CUDA graphs of %d variants", len(wanted))
        for variant in wanted:
            if captured and time.monotonic() - started > CAPTURE_SECONDS:
                logger.warning("%d variants have no CUDA graph and run larger ones", len(wanted) - len(captured))
                break
            self._send(variant, [], [])
            self.host_buffers[0].fence.set()
            graphs = [graph for blocks in parts for graph in self._graphs(blocks, variant)]
            if all(self.replay.capture(graph, partial(self.compute, graph)) for graph in graphs):
                captured.append(variant)
        self.variants = sorted(captured)
        used = (free - free_memory(self.cache.keys.device)) / 1e6
        seconds = time.monotonic() - started
        logger.info("captured %d CUDA graphs in %.1f s, using %.0f MB", len(self.replay.graphs), seconds, used)

    def _graphs(self, blocks: range, variant: Variant) -> list[Graph]:
        """Return the graphs of a pass. At the last exit all front rows emit, and a mixture needs all logits, so neither
        has a draw of its own."""
        parts = (PASS,) if blocks.stop == self.num_blocks or variant.mixes else (ROUTE, DRAW)
        return [Graph(part, blocks, variant) for part in parts]

    @classmethod
    def tried(cls, model: Nvium, cache: PagedCache) -> LayersBackend:
        """Return this backend with Triton's kernels, or `LayersBackend` if they cannot run here."""
        num_heads = model.config.num_attention_heads
        if cache.keys.dtype not in TRITON_TYPES:
            return LayersBackend(model, cache, f"Triton's kernels do not support {cache.keys.dtype}")
        if model.model.norm is not None:
            return LayersBackend(model, cache, "Triton's kernels do not support models that norm their loops")
        if not find_spec("triton"):
            return LayersBackend(model, cache, "Triton is not installed")
        if attention := best_attention(cache, num_heads):
            from nvium_core.engine.device.fused.decisions import FusedDecisions  # noqa: PLC0415 (needs Triton)
            from nvium_core.engine.device.fused.layers import FusedLayers  # noqa: PLC0415 (needs Triton)

            parts = FusedLayers(model, cache, attention), FusedDecisions(model, cache)
            backend = cls(model, cache, *parts, best_ragged(cache, num_heads))
            if works("a pass in Triton", backend.agrees):
                return backend
        return LayersBackend(model, cache, "Triton's kernels do not work on this device")

    @torch.inference_mode()
    def agrees(self) -> bool:
        """Whether a pass and that of the layers agree on one row. The cache must be empty, and is so again."""
        sequence = Sequence("trial", [0], SamplingParams(), seed=0, num_blocks=self.num_blocks, arrival=0)
        sequence.pages = [0]
        states_ND, found = self.cache.states_NSD[:, 0], list[tuple[Tensor, float, int]]()
        for backend in (self, LayersBackend(self.model, self.cache)):
            (outcome,) = backend.run(Step(range(self.num_blocks), [Run(sequence, 1)], WHOLE), 1).outcomes
            found.append((states_ND.clone(), outcome.emissions[0].log_p, outcome.emissions[0].block))
            for tensor in (states_ND, self.cache.keys[:, 0], self.cache.values[:, 0]):
                tensor.zero_()
        (own, own_log_p, own_exit), (expected, log_p, exit_taken) = found
        tolerance = CHECK_TOLERANCE * float(expected.abs().max())
        is_near = torch.allclose(own, expected, rtol=0, atol=tolerance)
        return is_near and own_exit == exit_taken and abs(own_log_p - log_p) < CHECK_TOLERANCE

    def pass_blocks(self, step: Step, blocks: range, parts: list[Progress]) -> Iterable[StepReport]:
        """Run a pass. Launch the next Step's before waiting for this pass, unless it has been launched already."""
        if step.policy.is_tied:
            return super().pass_blocks(step, blocks, parts)
        started = time.perf_counter()
        rows = [part.rows(blocks[-1]) for part in parts]
        flight, self._ahead = self._ahead, None
        if flight is None or not flight.computes(blocks, rows):
            flight = self._launch(blocks, rows, self.fronts(blocks, parts))
        if flight is None:
            return super().pass_blocks(step, blocks, parts)
        if step.ahead:
            with suppress(RuntimeError):  # the next Step will run it again, and raise
                self._ahead = self._launch_ahead(blocks, step.ahead, flight)
        self._take_answers(flight, parts)
        for part in parts:
            part.pass_rows(blocks)
        seconds = (time.perf_counter() - started) / len(blocks)
        return [StepReport(block + 1, 1, sum(len(own.rows) for own in rows), seconds) for block in blocks]

    def attend(self, rows: Items[Rows], slot_R: Tensor) -> Attend:
        return written(self.cache, slot_R, self._attend_runs(self.cache, rows))

    def _launch_ahead(self, blocks: range, rows: Items[Rows], flight: Flight) -> Flight | None:
        last = [(sequence, own.stop - 1) for sequence, own in rows if own.stop >= sequence.num_tokens]
        return self._launch(blocks, rows, [self.front(*each) for each in last], flight.fronts)

    def _launch(
        self, blocks: range, rows: Items[Rows], fronts: list[Front], previous: Items[Front] = ()
    ) -> Flight | None:
        """Launch a pass. Return None if it can only run synchronously. `previous`: see `Inputs.write`."""
        variant = self._variant(blocks, rows, fronts)
        if isinstance(variant, str):
            return self._launch_operators(blocks, rows, fronts, variant)
        self._send(variant, rows, fronts, previous)
        self._previous.copy_(self.answers[EMITTED])
        first, *draw = self._graphs(blocks, variant)
        self._run(first)
        return self._flight(fronts, blocks, rows, draw[0] if draw else None)

    def _launch_operators(self, blocks: range, rows: Items[Rows], fronts: list[Front], cause: str) -> Flight | None:
        """Launch a pass in PyTorch's operators, which read known tokens only. Its decisions use the fixed buffers."""
        variant = self.inputs.variant(fronts, is_last=blocks.stop == self.num_blocks)
        if any(own.stop > sequence.num_tokens for sequence, own in rows):
            return None
        self.count_eager(cause)
        if len(fronts) > MAX_FRONTS or variant.num_changes > self.max_changes:
            return None
        for block in blocks:
            self.forward(block, rows)
        if fronts:
            self._send(variant, [], fronts)
            self.compute(Graph(DECIDE, blocks, variant))
            self._receive()
        return self._flight(fronts, blocks, rows)

    def _flight(self, fronts: list[Front], blocks: range, rows: Items[Rows], draw: Graph | None = None) -> Flight:
        held = {sequence: (own, sequence.pages) for sequence, own in rows}
        return Flight(self.host_buffers[0], fronts, blocks, held, draw)

    def _send(self, variant: Variant, rows: Items[Rows], fronts: Items[Front], previous: Items[Front] = ()) -> None:
        """Copy a pass's inputs to the device. Its answers come into `host_buffers[0]`."""
        self.host_buffers.reverse()
        host = self.host_buffers[0]
        host.fence.wait()  # wait until the device has read this buffer's previous inputs
        words = self.inputs.write(host.inputs, variant, rows, fronts, previous)
        self._buffer[: len(words)].copy_(words, non_blocking=True)

    def _run(self, graph: Graph) -> None:
        self.replay.run(graph, partial(self.compute, graph))
        self._receive()

    def _receive(self) -> None:
        host = self.host_buffers[0]
        host.answers.copy_(self.answers, non_blocking=True)
        host.fence.set()

    def _variant(self, blocks: range, rows: Items[Rows], fronts: Items[Front]) -> Variant | str:
        """Return the cheapest captured variant for these rows, or why there is none."""
        needed = self.inputs.variant(fronts, is_last=blocks.stop == self.num_blocks)
        num_rows, mixes = sum(len(own.rows) for own in rows), needed.mixes and self.num_blocks > 1
        if max(len(own.rows) for own in rows) > MAX_SHORT_RUN_ROWS:
            return f"more than {MAX_SHORT_RUN_ROWS} rows of a prompt"
        if num_rows > MAX_ROWS:
            return f"more than {MAX_ROWS} rows"
        if needed.num_changes > self.max_changes:
            return f"more than {self.max_changes} changed logits"
        for known in islice(self.variants, bisect_left(self.variants, (num_rows,)), None):
            has_inputs = known.num_changes >= needed.num_changes and known.has_masks >= needed.has_masks
            if has_inputs and known.mixes >= mixes:
                return known
        return "a capture failed"

    def _take_answers(self, flight: Flight, parts: list[Progress]) -> None:
        """Wait for a pass and record its decisions. A pass without fronts has none."""
        host, num_fronts = flight.buffers, len(flight.fronts)
        if not num_fronts:
            return
        host.fence.wait()
        if flight.draw is not None and bool((host.answers[EXIT_TAKEN, :num_fronts] >= 0).any()):
            self._run(flight.draw)
            host.fence.wait()
        elif flight.draw is not None:
            host.answers[EMITTED, :num_fronts] = GOES_ON
        record_answers(parts, flight.fronts, host.answers)

    def compute(self, graph: Graph) -> None:
        """Compute the answers from the inputs in the buffer. CUDA graphs capture this function."""
        part, blocks, variant = graph
        inputs = self.inputs.views(self._buffer, variant)
        if part in (PASS, ROUTE):
            self._layers.run(blocks, inputs, self._previous)
        if part in (PASS, DECIDE):
            self._decisions.decide(blocks, inputs, variant, self.answers)
        elif part == ROUTE:
            self._decisions.route(blocks, inputs, self.answers)
        else:
            self._decisions.draw(blocks, inputs, variant, self.answers)


def variants(num_pages: int, max_changes: int, *, has_exits: bool) -> Iterator[Variant]:
    """Yield the inputs of all graphs. Plain requests have more numbers of rows than the others."""
    for mixes, (num_changes, has_masks) in product(
        (False, True) if has_exits else (False,), ((0, False), (max_changes, False), (max_changes, True))
    ):
        for size in POWERS if mixes or num_changes else SIZES:
            yield Variant(size, num_pages, num_changes, has_masks=has_masks, mixes=mixes)


def free_memory(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
