"""Runs a Step in one native call: computes its rows, emits the fronts' tokens, and scores rows.

If every running sequence takes part with its front row, a call may emit several tokens per sequence.

Shapes: T context, P head size.
"""

import ctypes
import sys
from array import array
from collections.abc import Iterator
from itertools import accumulate, islice
from typing import Any, get_args
from weakref import ref

import torch

from nvium_core.choices import Activation, QKNorm
from nvium_core.engine.config import MAX_DRAFTS, EngineConfig
from nvium_core.engine.device.decide import score_of
from nvium_core.engine.device.memory import check_memory
from nvium_core.engine.device.native.library import PRECISIONS, make_struct, native_library, struct
from nvium_core.engine.device.native.weights import Packer, address, pack_weights, packed_bytes, value_of
from nvium_core.engine.device.paged_cache import PagedCache
from nvium_core.engine.device.processor import instructions
from nvium_core.engine.events import StepReport
from nvium_core.engine.schedule.sequence import NUM_FIELDS, Sequence
from nvium_core.engine.schedule.step import Backend, Emission, Outcome, Run, Step, StepResult
from nvium_core.model.nvium import Nvium
from nvium_core.model.plan import LayerCall
from nvium_core.model.stored import FLOATS

MAX_EMISSIONS = max(32, MAX_DRAFTS + 1)  # maximum tokens that one run emits in a call

MIN_TILED_ROWS = 32
"""Passes of at least this many rows use AMX tiles, if the processor has them. Fewer rows waste tiles of 16 rows."""


class SeatMemory:
    """The arrays to which a seat points, and its last sequence, which this does not keep alive."""

    def __init__(self, sequence: Sequence, seat: Any, context: int) -> None:
        self.sequence = ref(sequence)
        self.page_list: list[int] | None = None
        self.num_pages = self.num_tokens = 0
        """How many of the sequence's pages and verified tokens are here. A call may write tokens behind these."""
        self.pages = array("q")
        self.tokens = array("q", bytes(8 * context))
        self.stops = array("q", sequence.stop_token_ids)
        self.changes = array("d")
        params = sequence.params
        seat.presence, seat.frequency = params.presence_penalty, params.frequency_penalty
        seat.repetition, seat.num_prompt_tokens = params.repetition_penalty, sequence.num_prompt_tokens
        seat.seed, seat.choice = sequence.seed, sequence.choice
        seat.draw = struct("Draw").from_buffer_copy(sequence.draw_bytes)
        seat.tokens, seat.num_stops, seat.stops = address(self.tokens), len(self.stops), address(self.stops)
        seat.num_changes, seat.changes, seat.mask_bytes, seat.mask = 0, None, 0, None


class Seats:
    """Pages, tokens and sampling parameters of running sequences. Only changes are rewritten."""

    def __init__(self, count: int, context: int) -> None:
        self.array = (struct("Seat") * count)()
        self.memory: list[SeatMemory | None] = [None] * count
        self._context = context
        self._spare = array("d", bytes(8 * NUM_FIELDS * MAX_EMISSIONS))

    def update(self, sequence: Sequence) -> int:
        """Update the sequence's seat, and return the seat's number."""
        number = sequence.seat
        assert number is not None
        seat, memory = self.array[number], self.memory[number]
        if memory is None or memory.sequence() is not sequence:
            self.memory[number] = memory = SeatMemory(sequence, seat, self._context + 1)
        pages = sequence.pages
        if memory.page_list is not pages or memory.num_pages != len(pages):  # each admission makes a new list
            memory.page_list, memory.num_pages, memory.pages = pages, len(pages), array("q", pages)
            seat.pages = address(memory.pages)
        memory.tokens[memory.num_tokens : sequence.num_tokens] = array("q", sequence.token_ids[memory.num_tokens :])
        memory.num_tokens = sequence.num_verified
        if sequence.changes is not None:
            memory.changes = sequence.changes.entries + self._spare
            seat.num_changes, seat.changes = len(sequence.changes), address(memory.changes)
        if sequence.constraint is not None:
            seat.mask = mask = sequence.constraint.allowed
            seat.mask_bytes = len(mask)
        return number


class NativeBackend(Backend):
    """The backend for models that `native.supports` accepts.

    With `EngineConfig.deterministic`, no pass uses AMX tiles (see `MIN_TILED_ROWS`).
    """

    num_multi_steps = MAX_EMISSIONS
    instructions: str | None = None

    def __init__(self, model: Nvium, cache: PagedCache, config: EngineConfig) -> None:
        self.instructions = instructions(config.instructions)
        self._cache = cache
        library = native_library(self.instructions)
        assert library is not None
        self.num_threads = torch.get_num_threads()
        dtype = model.dtype
        self._has_tiles = dtype != torch.float64 and bool(library.has_tiles())
        self._num_exits, self._vocab_size = model.config.num_exits, model.config.vocab_size
        self._run_native = getattr(library, f"run_{PRECISIONS[dtype]}")
        total_bytes = packed_bytes(model, library)
        check_memory(total_bytes, cache.num_bytes)
        packer = Packer(library, self.num_threads, total_bytes)
        self._weights = pack_weights(model, packer)
        is_tied = model.model.embed_tokens.weight is model.lm_head.weight
        self._embedding_kind, self._embedding = packer.embedding(model.model.embed_tokens.weight, is_packed=is_tied)
        context = config.context or model.config.max_position_embeddings
        max_sequences = config.bounds().sequences
        self._model = self._native_model(model, cache, context)
        self._seats = Seats(max_sequences, context)
        self._runs = (struct("Run") * max_sequences)()
        self._filled = array("q", bytes(8 * self._num_exits * max_sequences))
        self._emissions = (struct("Emission") * MAX_EMISSIONS * max_sequences)()
        self._scores = array("d")
        self._reports = (struct("BlockReport") * self._num_exits)()
        self._call = struct("Call")(
            runs=ctypes.addressof(self._runs),
            seats=ctypes.addressof(self._seats.array),
            reports=ctypes.addressof(self._reports),
            min_tiled_rows=MIN_TILED_ROWS if self._has_tiles and not config.deterministic else sys.maxsize,
        )

    def run(self, step: Step, max_rows: int) -> StepResult:
        call = self._call
        for number, run in enumerate(step.runs):
            self._write_run(number, run, step.limit)
        self._prepare_scores(step)
        ctypes.memset(self._reports, 0, ctypes.sizeof(self._reports))
        call.first, call.stop, call.is_tied = step.blocks.start, step.blocks.stop, step.policy.is_tied
        call.is_one_pass = len(step.policy.passes(step.blocks)) == 1
        call.num_runs, call.max_rows, call.seconds = len(step.runs), max_rows, step.seconds
        self._model.num_threads = self.num_threads
        self._run_native(ctypes.byref(self._model), ctypes.byref(call))
        width = 1 + self._num_exits + 2 * call.num_top
        scores = (self._scores[at : at + width] for at in range(0, len(self._scores), width))
        outcomes = [self._outcome(number, run, scores) for number, run in enumerate(step.runs)]
        reports = [
            StepReport(block, report.num_passes, report.num_rows, report.seconds)
            for block, report in enumerate(self._reports, start=1)
            if report.num_passes
        ]
        return StepResult(outcomes, reports)

    @property
    def part_seconds(self) -> dict[str, float]:
        return {"router": self._call.router_seconds, "head": self._call.head_seconds}

    def _write_run(self, number: int, run: Run, limit: int) -> None:
        sequence, stop = run
        first, native = number * self._num_exits, self._runs[number]
        self._filled[first : first + self._num_exits] = array("q", sequence.filled)
        native.seat, native.stop, native.num_tokens = self._seats.update(sequence), stop, sequence.num_tokens
        native.limit, native.num_emitted, native.num_scored = limit, 0, 0
        native.first_verified, native.first_scored = sequence.first_verified, sequence.first_scored
        native.is_scored_at_exit = sequence.is_scored_at_exit
        native.filled, native.log_reached = address(self._filled) + 8 * first, sequence.log_reached
        native.emissions = ctypes.addressof(self._emissions[number])

    def _outcome(self, number: int, run: Run, scores: "Iterator[array[float]]") -> Outcome:
        """Return a run's outcome. `scores` yields its scores next."""
        first, native = number * self._num_exits, self._runs[number]
        num_top = run.sequence.params.logprobs or 0
        own = [score_of(each, self._num_exits, num_top) for each in islice(scores, native.num_scored)]
        emitted = self._emissions[number][: native.num_emitted]
        filled_N = self._filled[first : first + self._num_exits].tolist()
        return Outcome(filled_N, native.log_reached, [Emission(e.token, e.block, e.log_p) for e in emitted], own)

    def _prepare_scores(self, step: Step) -> None:
        """Allocate memory for the scores of all rows that may pass the last block."""
        scored = [run for run in step.runs if run.sequence.needs_scores]
        count = sum(max(0, run.stop - max(run.sequence.first_scored, run.sequence.filled[-1])) for run in scored)
        most = max((run.sequence.params.logprobs or 0 for run in scored), default=0)
        self._call.num_top = num_top = min(most, self._vocab_size)
        self._scores = array("d", bytes(8 * count * (1 + self._num_exits + 2 * num_top)))
        self._call.scores = address(self._scores)

    def _native_model(self, model: Nvium, cache: PagedCache, context: int) -> Any:
        config, (layers, exits) = model.config, self._weights
        precise = torch.promote_types(model.dtype, torch.float32)
        cos_TR, sin_TR = map(torch.cat, zip(*model.model.rotary_emb(torch.arange(context), precise), strict=True))
        norm = model.model.norm
        self._tensors = {
            "norm": None if norm is None else norm.weight.detach().to(precise),
            "cos": cos_TR.contiguous(),
            "sin": sin_TR.contiguous(),
            "states": cache.states_NSD,
            "embedding": self._embedding,
        }
        blocks = model.model.blocks
        self._first_calls = array("q", accumulate(map(len, blocks), initial=0))
        calls = [call_struct(call) for block in blocks for call in block]
        self._calls = (struct("LayerCall") * len(calls))(*calls)
        held = make_struct(
            "Cache",
            kind=FLOATS[cache.keys.dtype],
            page_size=cache.page_size,
            num_slots=cache.num_slots,
            num_calls=cache.keys.shape[0],
            num_heads=cache.keys.shape[2],
            head_size=cache.keys.shape[3],
            keys=cache.keys.data_ptr(),
            values=cache.values.data_ptr(),
        )
        return make_struct(
            "Model",
            num_threads=self.num_threads,
            num_blocks=config.num_exits,
            width=config.hidden_size,
            inner_width=config.intermediate_size,
            num_heads=config.num_attention_heads,
            router_width=config.router_hidden_size,
            adapter_width=config.adapter_hidden_size,
            vocab_size=config.vocab_size,
            eps=config.rms_norm_eps,
            temperature=config.router_temperature,
            **{
                name: getattr(config, name)
                for name in ("embedding_scale", "residual_scale", "logit_scale", "logit_cap")
            },
            context=context,
            rotary_size=config.rotary_size,
            first_calls=address(self._first_calls),
            calls=ctypes.addressof(self._calls),
            layers=ctypes.addressof(layers.array),
            exits=ctypes.addressof(exits.array),
            cache=held,
            embedding_kind=self._embedding_kind,
            **{name: value_of(tensor) for name, tensor in self._tensors.items()},
        )


def call_struct(call: LayerCall) -> Any:
    """Return the `LayerCall` of call.h."""
    values = call._asdict() | {
        "rotary": -1 if call.rotary is None else call.rotary,
        "qk_norm": -1 if call.qk_norm is None else get_args(QKNorm).index(call.qk_norm),
        "activation": get_args(Activation).index(call.activation),
    }
    del values["norms"]  # a layer without a norm has none in its weights
    return make_struct("LayerCall", **values)
