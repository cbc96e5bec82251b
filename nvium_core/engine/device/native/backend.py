"""Runs a Step in one native call: computes its rows, emits the fronts' tokens, and scores rows.

If every running sequence takes part with its front row, a call may emit several tokens per sequence.

Shapes: T context, P head size.
"""

import ctypes
import struct
import sys
from array import array
from collections.abc import Mapping
from typing import Any

import torch

from nvium_core.choices import Instructions
from nvium_core.engine.device.memory import check_memory
from nvium_core.engine.device.native.instructions import instructions as resolved
from nvium_core.engine.device.native.library import COUNT, POINTER, PRECISIONS, REAL, fields, native_library
from nvium_core.engine.device.native.packing import Packer
from nvium_core.engine.device.native.seats import MAX_EMISSIONS, Seats
from nvium_core.engine.device.native.weights import address, pack_weights, packed_bytes
from nvium_core.engine.device.paged_cache import PagedCache
from nvium_core.engine.events import Score, StepReport
from nvium_core.engine.params import EngineConfig
from nvium_core.engine.schedule import scheduler
from nvium_core.engine.schedule.step import Emission, Outcome, Run, Step, StepResult
from nvium_core.model.nvium import Nvium

MIN_TILED_ROWS = 32
"""Passes of at least this many rows use AMX tiles, if the processor has them. Fewer rows waste tiles of 16 rows."""

RUN = struct.Struct("@6qPd2qP")  # `Run` of call.h
EMISSION = struct.Struct("@qqd")  # `Emission` of call.h


class NativeModel(ctypes.Structure):
    """`Model` of call.h."""

    _fields_ = (
        *fields(COUNT, "num_threads num_blocks width inner_width num_heads num_key_heads head_size"),
        *fields(COUNT, "router_width adapter_width vocab_size page_size num_slots"),
        *fields(REAL, "eps temperature"),
        *fields(POINTER, "first_layers layers exits keys values cos sin states"),
        *fields(COUNT, "embedding_kind"),
        *fields(POINTER, "embedding"),
    )


class NativeReport(ctypes.Structure):
    """`BlockReport` of call.h."""

    _fields_ = (*fields(COUNT, "num_steps num_rows"), ("seconds", REAL))


class NativeCall(ctypes.Structure):
    """`Call` of call.h, including its `Scores`."""

    _fields_ = (
        *fields(COUNT, "first stop is_one_pass num_runs"),
        *fields(POINTER, "runs seats"),
        ("max_rows", COUNT),
        ("seconds", REAL),
        *fields(COUNT, "min_tiled_rows num_scored num_top"),
        *fields(POINTER, "logprobs top_tokens top_logprobs exit_probabilities reports"),
        *fields(REAL, "router_seconds head_seconds"),
    )


class NativeBackend:
    """The backend for models that `native.supports` accepts.

    With `is_deterministic`, no pass uses AMX tiles (see `MIN_TILED_ROWS`).
    """

    tokens_ahead = MAX_EMISSIONS
    launches_ahead = False
    eager_passes: Mapping[str, int] = {}

    def __init__(
        self,
        model: Nvium,
        cache: PagedCache,
        *,
        max_sequences: int,
        context: int | None = None,
        is_deterministic: bool = False,
        instructions: Instructions = "auto",
    ) -> None:
        self.instructions: str | None = resolved(instructions)
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
        context = context or model.config.max_position_embeddings
        self._model = self._native_model(model, cache, context)
        self._seats = Seats(max_sequences, context)
        self._runs = bytearray(RUN.size * max_sequences)
        self._filled = array("q", bytes(8 * self._num_exits * max_sequences))
        self._emissions = bytearray(EMISSION.size * MAX_EMISSIONS * max_sequences)
        self._emissions_at = ctypes.addressof(ctypes.c_char.from_buffer(self._emissions))
        self._scores: dict[str, array[Any]] = {}
        self._reports = (NativeReport * self._num_exits)()
        self._call = NativeCall(
            runs=ctypes.addressof(ctypes.c_char.from_buffer(self._runs)),
            seats=ctypes.addressof(self._seats.array),
            reports=ctypes.addressof(self._reports),
            min_tiled_rows=MIN_TILED_ROWS if self._has_tiles and not is_deterministic else sys.maxsize,
        )

    def prepare(self, config: EngineConfig) -> None:
        """Nothing to prepare."""

    def run(self, step: Step, max_rows: int) -> StepResult:
        passes = step.passes
        call = self._call
        for number, run in enumerate(step.runs):
            self._write_run(number, run, step.limit)
        self._prepare_scores(step)
        ctypes.memset(self._reports, 0, ctypes.sizeof(self._reports))
        call.first, call.stop, call.is_one_pass = step.blocks.start, step.blocks.stop, len(passes) == 1
        call.num_runs, call.max_rows, call.seconds = len(step.runs), max_rows, scheduler.SECONDS_AHEAD
        self._model.num_threads = self.num_threads
        self._run_native(ctypes.byref(self._model), ctypes.byref(call))
        scores = self._read_scores()
        outcomes = [self._outcome(number, run, scores) for number, run in enumerate(step.runs)]
        reports = [
            StepReport(block, report.num_steps, report.num_rows, report.seconds)
            for block, report in enumerate(self._reports, start=1)
            if report.num_steps
        ]
        return StepResult(outcomes, reports)

    @property
    def part_seconds(self) -> dict[str, float]:
        return {"router": self._call.router_seconds, "head": self._call.head_seconds}

    def _write_run(self, number: int, run: Run, limit: int) -> None:
        sequence, stop = run
        first = number * self._num_exits
        self._filled[first : first + self._num_exits] = array("q", sequence.filled)
        RUN.pack_into(
            self._runs,
            number * RUN.size,
            self._seats.update(sequence),
            stop,
            sequence.num_tokens,
            limit,
            sequence.first_verified,
            sequence.first_scored,
            address(self._filled) + 8 * first,
            sequence.log_reached,
            0,
            0,
            self._emissions_at + number * MAX_EMISSIONS * EMISSION.size,
        )

    def _outcome(self, number: int, run: Run, scores: list[Score]) -> Outcome:
        """Return a run's outcome. Its scores are removed from the start of `scores`."""
        first, at = number * self._num_exits, number * MAX_EMISSIONS * EMISSION.size
        *_, log_reached, num_emitted, num_scored, _ = RUN.unpack_from(self._runs, number * RUN.size)
        own, scores[:] = scores[:num_scored], scores[num_scored:]
        num_top = run.sequence.params.logprobs or 0
        if num_top < self._call.num_top:
            own = [score._replace(top=score.top[:num_top]) for score in own]
        emissions = EMISSION.iter_unpack(memoryview(self._emissions)[at : at + num_emitted * EMISSION.size])
        filled = self._filled[first : first + self._num_exits].tolist()
        return Outcome(filled, log_reached, [Emission(*each) for each in emissions], own)

    def _prepare_scores(self, step: Step) -> None:
        """Allocate memory for the scores of all rows that may pass the last block. The call sets `num_scored`."""
        scored = [run for run in step.runs if run.sequence.needs_scores]
        count = sum(max(0, run.stop - max(run.sequence.first_scored, run.sequence.filled[-1])) for run in scored)
        num_top = min(max((run.sequence.params.logprobs or 0 for run in scored), default=0), self._vocab_size)
        self._call.num_scored, self._call.num_top, self._scores = 0, num_top, {}
        if count:
            self._scores = {
                "logprobs": array("d", bytes(8 * count)),
                "top_tokens": array("q", bytes(8 * count * num_top)),
                "top_logprobs": array("d", bytes(8 * count * num_top)),
                "exit_probabilities": array("d", bytes(8 * count * self._num_exits)),
            }
        for name, numbers in self._scores.items():
            setattr(self._call, name, address(numbers))

    def _read_scores(self) -> list[Score]:
        """Return the scores in row order, each with `num_top` alternatives."""
        if not self._scores:
            return []
        logprobs, top_tokens, top_logprobs, p = self._scores.values()
        num_top, num_exits = self._call.num_top, self._num_exits
        top = list(zip(top_tokens, top_logprobs, strict=True))
        return [
            Score(
                logprobs[row],
                tuple(top[row * num_top : (row + 1) * num_top]),
                tuple(p[row * num_exits : (row + 1) * num_exits]),
            )
            for row in range(self._call.num_scored)
        ]

    def _native_model(self, model: Nvium, cache: PagedCache, context: int) -> NativeModel:
        config, (layers, exits) = model.config, self._weights
        precise = torch.promote_types(model.dtype, torch.float32)
        cos_TP, sin_TP = model.model.rotary_emb(torch.arange(context), precise)
        self._tensors = {
            "keys": cache.keys,
            "values": cache.values,
            "cos": cos_TP.contiguous(),
            "sin": sin_TP.contiguous(),
            "states": cache.states_NSD,
            "embedding": self._embedding,
        }
        self._first_layers = array("q", [*(block.start for block in config.blocks), config.num_hidden_layers])
        return NativeModel(
            num_blocks=config.num_exits,
            width=config.hidden_size,
            inner_width=config.intermediate_size,
            num_heads=config.num_attention_heads,
            num_key_heads=cache.keys.shape[2],
            head_size=cache.keys.shape[3],
            router_width=config.router_hidden_size,
            adapter_width=config.adapter_hidden_size,
            vocab_size=config.vocab_size,
            page_size=cache.page_size,
            num_slots=cache.keys.shape[1],
            eps=config.rms_norm_eps,
            temperature=config.router_temperature,
            first_layers=address(self._first_layers),
            layers=ctypes.addressof(layers.array),
            exits=ctypes.addressof(exits.array),
            embedding_kind=self._embedding_kind,
            **{name: tensor.data_ptr() for name, tensor in self._tensors.items()},
        )
