"""Runs Steps as CUDA graphs on fixed buffers: one copy of the inputs, one graph, one copy of the results.

There is one graph for a pass through all blocks. A pass through one block has two: the layers with the routers, and the
decisions, which are skipped if no front row exits: the head may be as large as a block. Each is captured for several
numbers of rows, with and without mixtures, rankings and changed logits, before the first request. A pass runs the
smallest captured graph that includes what it needs.
While the host waits for the tokens of a Step, the device already has the pass of the next one, which reads the tokens
in device memory. A pass for a sequence that has ended does no harm: it writes only beyond the sequence's last row, and
whoever gets such a page writes the rows before reading them. The layers of long runs are PyTorch's operators, and so
are Steps with very many changed logits.

Shapes: R rows, with padding.
"""

import logging
import math
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Items
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import islice, product
from typing import NamedTuple

import torch
from torch import Tensor

from nvium_core.engine.config import EngineConfig
from nvium_core.engine.device.attention import CHECK_TOLERANCE, RunAttention, kernels_agree, works
from nvium_core.engine.device.decide import EMITTED, EXIT_TAKEN, NUM_ANSWERS
from nvium_core.engine.device.graphs.capture import COMPILE_SECONDS, UNCOMPILED, Compiler, Fence, Replay
from nvium_core.engine.device.inputs import MAX_FRONTS, Front, InputViews, Variant
from nvium_core.engine.device.layers import LayersBackend, Progress, record_answers
from nvium_core.engine.device.paged_cache import PagedCache
from nvium_core.engine.events import StepReport
from nvium_core.engine.sampling_params import SamplingParams
from nvium_core.engine.schedule.sequence import Sequence
from nvium_core.engine.schedule.step import MAX_SHORT_RUN_ROWS, WHOLE, Rows, Run, Step, policies_of
from nvium_core.model.exits import Router
from nvium_core.model.nvium import Nvium

logger = logging.getLogger(__name__)

MAX_ROWS = MAX_FRONTS
POWERS = [1 << power for power in range(MAX_ROWS.bit_length())]
SIZES = sorted({*POWERS, *range(16, MAX_ROWS + 1, 16)})
"""Numbers of rows of the captured graphs of plain requests. Other kinds of requests have powers of two."""

CAPTURE_SECONDS = 20.0
"""Time for capturing. Passes whose graph is then missing run a larger one."""


@dataclass
class HostBuffers:
    """Inputs and answers of a pass in host memory. The device reaches `fence` when it has copied the answers."""

    inputs: Tensor
    answers: Tensor
    fence: Fence


PASS, ROUTE, DECIDE = "pass", "layers and routers", "decisions"


class Graph(NamedTuple):
    """What a CUDA graph computes: layers and decisions, layers and routers, or the decisions that follow these."""

    part: str
    blocks: range
    variant: Variant


class Flight(NamedTuple):
    """A pass in flight.

    `buffers` receive its answers, and `rows` has the rows and pages of each sequence. `second` is the graph that draws
    the tokens, if the pass has one.
    """

    buffers: HostBuffers
    fronts: list[Front]
    blocks: range
    rows: dict[Sequence, tuple[range, list[int]]]
    second: Graph | None

    def computes(self, blocks: range, rows: Items[Rows]) -> bool:
        """Whether the pass has these rows. A sequence that has lost its pages has another list of pages."""
        found = ((*self.rows.get(sequence, (None, None)), own, sequence.pages) for sequence, own in rows)
        return self.blocks == blocks and all(known == own and held is pages for known, held, own, pages in found)


class GraphsBackend(LayersBackend):
    async_scheduling = True
    max_changes = 65_536

    def __init__(
        self,
        model: Nvium,
        cache: PagedCache,
        run_layers: Callable[[range, InputViews, Tensor], None],
        attend_runs: RunAttention,
        make_fence: Callable[[torch.device], Fence] = Fence,
        *,
        compiles: bool = False,
    ) -> None:
        """`run_layers`: (blocks, inputs, tokens of the previous pass [R]) computes the states of the rows after each of
        these blocks. `attend_runs`: attention of runs that are too long for the graphs. `compiles`: see `Compiler`."""
        super().__init__(model, cache)
        self._run_layers, self.attend_runs = run_layers, attend_runs
        self._compiler = Compiler(math.inf if compiles else None)
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
        self._async_flight: Flight | None = None
        """The next Step's pass. The last Step has launched it, so that the device is busy while the host schedules."""
        self.replay = Replay(device)

    @property
    def instructions(self) -> str | None:
        return "graphs" if self.replay.captures and self.variants else None

    @torch.inference_mode()
    def prepare(self, config: EngineConfig) -> None:
        """Compile the decisions. Capture the graphs, first the one that includes all others: these reuse its memory."""
        if not self.replay.captures:
            return
        num_rows = config.bounds("cuda").sequences * MAX_SHORT_RUN_ROWS
        most = next((size for size in POWERS if size >= num_rows), MAX_ROWS)
        *others, largest = [variant for variant in self.variants if variant.num_rows <= most]
        wanted, captured = [largest, *sorted(others, key=lambda variant: variant[2:])], list[Variant]()
        policies = policies_of(config.schedule, self.num_blocks)
        parts = [blocks for policy in policies for blocks in policy.passes(range(self.num_blocks))]
        self._compile(wanted, parts)
        started = time.monotonic()
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
        logger.info("captured %d CUDA graphs in %.1f s", len(self.replay.graphs), time.monotonic() - started)

    def _compile(self, variants: Items[Variant], parts: Items[range]) -> None:
        """Compile the decisions for one row and for many, those without mixtures first, while there is time."""
        if self._compiler.until is None:
            return
        started, sizes = time.monotonic(), (1, max(variant.num_rows for variant in variants))
        self._compiler.until = started + COMPILE_SECONDS
        logger.info("compiling the decisions, for a minute at most")
        for variant in sorted(variants, key=lambda variant: (variant.mixes, variant[2:])):
            if variant.num_rows in sizes and time.monotonic() < self._compiler.until:
                self._send(variant, [], [])
                self.host_buffers[0].fence.set()
                for graph in (graph for blocks in parts for graph in self._graphs(blocks, variant)):
                    self.compute(graph)
        logger.info("compiled the decisions in %.1f s", time.monotonic() - started)
        if time.monotonic() > self._compiler.until:
            logger.warning("some decisions are not compiled, for lack of time, and run in PyTorch's operators")
        self._compiler.until = started  # nothing compiles while serving

    def _graphs(self, blocks: range, variant: Variant) -> list[Graph]:
        """Return the graphs of a pass. At the last exit all front rows emit, and a mixture needs all logits, so neither
        has decisions of its own."""
        parts = (PASS,) if blocks.stop == self.num_blocks or variant.mixes else (ROUTE, DECIDE)
        return [Graph(part, blocks, variant) for part in parts]

    @classmethod
    def with_fallback(cls, model: Nvium, cache: PagedCache) -> LayersBackend:
        """Return this backend with Triton's kernels, or `LayersBackend` if they cannot run here."""
        if cache.keys.dtype == torch.float64:
            return LayersBackend(model, cache, f"Triton's kernels do not support {cache.keys.dtype}")
        if not find_spec("triton"):
            return LayersBackend(model, cache, "Triton is not installed")
        from nvium_core.engine.device.fused.layers import (  # noqa: PLC0415 (needs Triton)
            FusedLayers,
            in_tiles,
            ragged_in_tiles,
        )

        if works("attention in Triton", partial(kernels_agree, cache, model.config, in_tiles, ragged_in_tiles)):
            for router in (each for each in model.exits.modules() if isinstance(each, Router)):
                router.to(torch.promote_types(model.dtype, torch.float32))  # in which it computes
            backend = cls(model, cache, FusedLayers(model, cache).run, ragged_in_tiles, compiles=True)
            if works("a pass in Triton", backend.agrees):
                return backend
        return LayersBackend(model, cache, "Triton's kernels do not work on this device")

    @torch.inference_mode()
    def agrees(self) -> bool:
        """Whether a pass and that of the layers agree on a few rows. The cache must be empty, and is so again."""
        count = min(4, self.cache.page_size, self.model.config.vocab_size)
        sequence = Sequence("trial", range(count), SamplingParams(), seed=0, num_blocks=self.num_blocks, arrival=0)
        sequence.pages = [0]
        step = Step(range(self.num_blocks), [Run(sequence, count)], WHOLE)
        states_NQD, found = self.cache.states_NSD[:, :count], list[tuple[Tensor, float, int]]()
        for backend in (self, LayersBackend(self.model, self.cache)):
            (outcome,) = backend.run(step, count).outcomes
            found.append((states_NQD.clone(), outcome.emissions[0].log_p, outcome.emissions[0].block))
            for tensor in (states_NQD, self.cache.keys[:, :count], self.cache.values[:, :count]):
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
        flight, self._async_flight = self._async_flight, None
        if flight is None or not flight.computes(blocks, rows):
            flight = self._launch(blocks, rows, self.fronts(blocks, parts))
        if flight is None:
            return super().pass_blocks(step, blocks, parts)
        if step.async_rows:
            with suppress(RuntimeError):  # the next Step will run it again, and raise
                self._async_flight = self._launch_async(blocks, step.async_rows, flight)
        self._take_answers(flight, parts)
        for part in parts:
            part.pass_rows(blocks)
        seconds = (time.perf_counter() - started) / len(blocks)
        return [StepReport(block + 1, 1, sum(len(own.rows) for own in rows), seconds) for block in blocks]

    def _launch_async(self, blocks: range, rows: Items[Rows], flight: Flight) -> Flight | None:
        last = [(sequence, own.stop - 1) for sequence, own in rows if own.stop >= sequence.num_tokens]
        fronts = [self.front(s, row, s.log_reached if row < s.num_tokens else 0.0) for s, row in last]
        return self._launch(blocks, rows, fronts, flight.fronts)

    def _launch(
        self, blocks: range, rows: Items[Rows], fronts: list[Front], previous: Items[Front] = ()
    ) -> Flight | None:
        """Launch a pass. Return None if it can only run synchronously. `previous`: see `Inputs.write`."""
        variant = self._variant(blocks, rows, fronts)
        if isinstance(variant, str):
            return self._launch_operators(blocks, rows, fronts, variant)
        self._send(variant, rows, fronts, previous)
        self._previous.copy_(self.answers[EMITTED])
        first, *second = self._graphs(blocks, variant)
        self._run(first)
        return self._flight(fronts, blocks, rows, *second)

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
            self.compute(Graph(DECIDE, blocks, variant), UNCOMPILED)
            self._receive()
        return self._flight(fronts, blocks, rows)

    def _flight(self, fronts: list[Front], blocks: range, rows: Items[Rows], second: Graph | None = None) -> Flight:
        held = {sequence: (own, sequence.pages) for sequence, own in rows}
        return Flight(self.host_buffers[0], fronts, blocks, held, second)

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
            if has_inputs and known.is_ranked >= needed.is_ranked and known.mixes >= mixes:
                return known
        return "a capture failed"

    def _take_answers(self, flight: Flight, parts: list[Progress]) -> None:
        """Wait for a pass and record its decisions. A pass without fronts has none."""
        host, num_fronts = flight.buffers, len(flight.fronts)
        if not num_fronts:
            return
        host.fence.wait()
        if flight.second is not None and bool((host.answers[EXIT_TAKEN, :num_fronts] >= 0).any()):
            self._run(flight.second)
            host.fence.wait()
        record_answers(parts, flight.fronts, host.answers)

    def compute(self, graph: Graph, compiler: Compiler | None = None) -> None:
        """Compute the answers from the inputs in the buffer. CUDA graphs capture this function."""
        part, blocks, variant = graph
        inputs = self.inputs.views(self._buffer, variant)
        if part != DECIDE:
            self._run_layers(blocks, inputs, self._previous)
        self.answers[:, : variant.num_rows] = (compiler or self._compiler).decide(
            self.model, self.cache.states_NSD, blocks, inputs, variant, emits=part != ROUTE
        )


def variants(num_pages: int, max_changes: int, *, has_exits: bool) -> Iterator[Variant]:
    """Yield the inputs of all graphs. Plain requests have more numbers of rows than the others."""
    kinds = (0, False, False), (0, False, True), (max_changes, False, True), (max_changes, True, True)
    for mixes, kind in product((False, True) if has_exits else (False,), kinds):
        for size in POWERS if mixes or kind[-1] else SIZES:
            yield Variant(size, num_pages, *kind, mixes, has_original=True)
