"""A Step in one native call: rows through blocks, what fronts emit, scores; several tokens where nothing waits.

Shapes: D width, S cache slots, N blocks.
"""

import ctypes
import struct
import sys
from array import array
from typing import Any

import torch

from nvium_core.choices import Instructions
from nvium_core.engine.device.layers.backend import LayersBackend
from nvium_core.engine.device.native.instructions import instructions as resolved
from nvium_core.engine.device.native.library import PRECISIONS, native_library
from nvium_core.engine.device.native.seats import MAX_EMISSIONS, Seats
from nvium_core.engine.device.native.weights import ExitShape, Pointers, Store, address
from nvium_core.engine.device.paged_cache import PagedCache
from nvium_core.engine.events import Score, StepReport
from nvium_core.engine.params import EngineConfig
from nvium_core.engine.schedule.step import Emission, Outcome, Run, Step, StepResult
from nvium_core.model.nvium import Nvium

MAX_RUN_ROWS = 32
"""Rows of one sequence that run natively anywhere. More take AMX's tiles, or else PyTorch's products, which are 1.3
times as fast as the native ones in float32. In bfloat16 all rows run natively, and no bit depends on company."""

RUN = struct.Struct("@6qPd2qP")
"""`Run` of decide.h."""

EMISSION = struct.Struct("@qqd")
"""`Emission` of decide.h."""


class BlockShape(ctypes.Structure):
    """`BlockShape` of block.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("boundary", "num_layers", "first_layer", "width", "inner", "num_heads")),
        *((name, ctypes.c_int64) for name in ("num_key_heads", "head_size", "page_size", "num_slots")),
        ("eps", ctypes.c_double),
    )


class NativeModel(ctypes.Structure):
    """`Model` of decide.h."""

    _fields_ = (
        ("num_blocks", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("shapes", "layers", "exit_shape", "exits", "tensors")),
    )


class NativeReport(ctypes.Structure):
    """`BlockReport` of step.h."""

    _fields_ = (("num_steps", ctypes.c_int64), ("num_rows", ctypes.c_int64), ("seconds", ctypes.c_double))


class NativeCall(ctypes.Structure):
    """`Call` of step.h, whose `Scores` are part of it."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("first", "stop", "whole", "num_runs")),
        ("runs", ctypes.c_void_p),
        ("seats", ctypes.c_void_p),
        ("max_rows", ctypes.c_int64),
        ("seconds", ctypes.c_double),
        *((name, ctypes.c_int64) for name in ("num_threads", "is_tiled", "num_scored")),
        *((name, ctypes.c_void_p) for name in ("slots", "targets", "are_original")),
        ("num_top", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("logprobs", "top_tokens", "top_logprobs", "exit_probabilities")),
        ("reports", ctypes.c_void_p),
        *((name, ctypes.c_double) for name in ("router_seconds", "head_seconds")),
    )


Room = dict[str, "array[Any]"]
"""Where a call writes scores, by the names of `Scores` in score.h."""


class NativeBackend:
    """Only for a model that the native functions know. Long runs in float32 take AMX's tiles, or go through the layers
    where the processor has none, unless `is_deterministic`."""

    tokens_ahead = MAX_EMISSIONS

    def __init__(
        self,
        model: Nvium,
        cache: PagedCache,
        *,
        max_sequences: int,
        is_deterministic: bool = False,
        instructions: Instructions = "auto",
    ) -> None:
        self.instructions: str | None = resolved(instructions)
        library = native_library(self.instructions)
        assert library is not None
        self.num_threads = torch.get_num_threads()
        dtype = model.lm_head.weight.dtype
        self._max_run_rows = sys.maxsize if is_deterministic or dtype == torch.bfloat16 else MAX_RUN_ROWS
        self._has_tiles = dtype == torch.float32 and bool(library.has_tiles())
        self._layers = LayersBackend(model, cache)
        self._num_exits, self._vocab_size = model.config.num_exits, model.config.vocab_size
        self._run_native = getattr(library, f"run_{PRECISIONS[model.lm_head.weight.dtype]}")
        self._model = self._described(model, cache, Store(model, library.vector_bytes()))
        self._seats = Seats(max_sequences, model.config.max_position_embeddings)
        self._runs = bytearray(RUN.size * max_sequences)
        self._filled = array("q", bytes(8 * self._num_exits * max_sequences))
        self._emissions = bytearray(EMISSION.size * MAX_EMISSIONS * max_sequences)
        self._emissions_at = ctypes.addressof(ctypes.c_char.from_buffer(self._emissions))
        self._reports = (NativeReport * self._num_exits)()
        self._call = NativeCall(
            runs=ctypes.addressof(ctypes.c_char.from_buffer(self._runs)),
            seats=ctypes.addressof(self._seats.array),
            reports=ctypes.addressof(self._reports),
        )

    def prepare(self, config: EngineConfig) -> None:
        """Nothing: weights are packed when the backend is made."""

    def run(self, step: Step, max_rows: int) -> StepResult:
        """A run goes by its own rows through the Step's first block, or the last if it is whole: a later block with too
        many of them is left to a Step that begins there."""
        counted = step.blocks[-1 if step.whole else 0]
        is_long = any(run.stop - run.sequence.filled[counted] > self._max_run_rows for run in step.runs)
        if is_long and not self._has_tiles:
            return self._layers.run(step, max_rows)
        call = self._call
        call.is_tiled = is_long
        for number, run in enumerate(step.runs):
            self._write(number, run)
        room = self._ask_for_scores(step)
        ctypes.memset(self._reports, 0, ctypes.sizeof(self._reports))
        call.first, call.stop, call.whole = step.blocks[0], step.blocks[-1] + 1, step.whole
        call.num_runs, call.seconds = len(step.runs), step.seconds
        call.max_rows = min(max_rows, self._max_run_rows)
        call.num_threads = self.num_threads
        self._run_native(ctypes.byref(self._model), ctypes.byref(call))
        scores = self._scores(room) if room else []
        outcomes = [self._outcome(number, run, scores) for number, run in enumerate(step.runs)]
        reports = [
            StepReport(block, report.num_steps, report.num_rows, report.seconds)
            for block, report in enumerate(self._reports, start=1)
            if report.num_steps
        ]
        return StepResult(outcomes, reports)

    @property
    def part_seconds(self) -> dict[str, float]:
        """Of all calls so far, by what they went to."""
        return {"router": self._call.router_seconds, "head": self._call.head_seconds}

    def _write(self, number: int, run: Run) -> None:
        sequence, stop, limit = run
        first = number * self._num_exits
        self._filled[first : first + self._num_exits] = array("q", sequence.filled)
        RUN.pack_into(
            self._runs,
            number * RUN.size,
            self._seats.of(sequence),
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
        first, at = number * self._num_exits, number * MAX_EMISSIONS * EMISSION.size
        *_, log_reached, num_emitted, num_scored, _ = RUN.unpack_from(self._runs, number * RUN.size)
        own, scores[:] = scores[:num_scored], scores[num_scored:]
        num_top = run.sequence.params.logprobs or 0
        if num_top < self._call.num_top:
            own = [score._replace(top=score.top[:num_top]) for score in own]
        emissions = EMISSION.iter_unpack(memoryview(self._emissions)[at : at + num_emitted * EMISSION.size])
        filled = self._filled[first : first + self._num_exits].tolist()
        return Outcome(filled, log_reached, [Emission(*each) for each in emissions], own)

    def _ask_for_scores(self, step: Step) -> Room | None:
        """Room for the scores of all rows that may pass the last block; they are counted by the call."""
        scored = [run for run in step.runs if run.sequence.needs_scores]
        count = sum(max(0, run.stop - max(run.sequence.first_scored, run.sequence.filled[-1])) for run in scored)
        most = min(max((run.sequence.params.logprobs or 0 for run in scored), default=0), self._vocab_size)
        self._call.num_scored, self._call.num_top = 0, most
        if not count:
            return None
        room: Room = {
            "logprobs": array("d", bytes(8 * count)),
            "top_tokens": array("q", bytes(8 * count * most)),
            "top_logprobs": array("d", bytes(8 * count * most)),
            "exit_probabilities": array("d", bytes(8 * count * self._num_exits)),
        }
        for name, numbers in room.items():
            setattr(self._call, name, address(numbers))
        return room

    def _scores(self, room: Room) -> list[Score]:
        """In the order of rows, with as many alternatives as any run asks for."""
        most, num_exits = self._call.num_top, self._num_exits
        top, p = list(zip(room["top_tokens"], room["top_logprobs"], strict=True)), room["exit_probabilities"]
        return [
            Score(
                room["logprobs"][row],
                tuple(top[row * most : (row + 1) * most]),
                tuple(p[row * num_exits : (row + 1) * num_exits]),
            )
            for row in range(self._call.num_scored)
        ]

    def _described(self, model: Nvium, cache: PagedCache, store: Store) -> NativeModel:
        """Where everything is that calls read, which is kept for as long as this."""
        config = model.config
        precise = torch.promote_types(model.lm_head.weight.dtype, torch.float32)
        positions = torch.arange(config.max_position_embeddings)
        cos_TP, sin_TP = (x.contiguous() for x in model.model.rotary(positions, precise))
        embedding = model.model.embed_tokens.weight.detach().contiguous()
        tensors = Pointers([cache.keys, cache.values, cos_TP, sin_TP, cache.states_NSD, embedding])
        layers, exits = [store.block(block) for block in config.blocks], store.exits()
        shapes = (BlockShape * config.num_exits)(
            *(
                BlockShape(
                    boundary,
                    len(block),
                    block.start,
                    config.hidden_size,
                    config.intermediate_size,
                    config.num_attention_heads,
                    cache.keys.shape[2],
                    cache.keys.shape[3],
                    cache.page_size,
                    cache.keys.shape[1],
                    config.rms_norm_eps,
                )
                for boundary, block in enumerate(config.blocks)
            )
        )
        exit_shape = ExitShape.of(model)
        lists = [
            (ctypes.c_void_p * len(each))(*[ctypes.addressof(one.array) for one in each]) for each in (layers, exits)
        ]
        self._kept = tensors, layers, exits, shapes, exit_shape, lists
        parts = (shapes, lists[0], exit_shape, lists[1], tensors.array)
        return NativeModel(config.num_exits, *[ctypes.addressof(part) for part in parts])
