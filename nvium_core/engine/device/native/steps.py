"""A Step in one native call: its rows through the block, and decisions for fronts that draw plainly.

A Step that says which one follows goes on to that in the same call, as long as a front does.

Shapes: R rows, D width, S cache slots, F fronts.
"""

import ctypes
import struct
from array import array

import torch

from nvium_core.engine.device.native.library import PRECISIONS
from nvium_core.engine.device.native.seats import Seats
from nvium_core.engine.device.native.threads import Threads
from nvium_core.engine.device.native.weights import ExitShape, Pointers, Store, address
from nvium_core.engine.device.paged_cache import PagedCache
from nvium_core.engine.schedule.sequence import Sequence
from nvium_core.engine.schedule.step import Step, StepResult, decide_together
from nvium_core.model.nvium import NviumForCausalLM

MAX_STEP_ROWS, MAX_RUN_ROWS = 128, 32
"""Rows of a Step, and of one sequence in it, that always run natively; for more, PyTorch's products may be faster."""

GOES_ON = -2
"""Stands in a token's place, as `NO_TOKEN` may."""

OUTCOME = struct.Struct("qqdd")
"""`Outcome` of step.h."""


class BlockShape(ctypes.Structure):
    """`BlockShape` of block.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("boundary", "num_layers", "first_layer", "width", "inner", "num_heads")),
        *((name, ctypes.c_int64) for name in ("num_key_heads", "head_size", "page_size", "num_slots")),
        ("eps", ctypes.c_double),
    )


class NativeStep(ctypes.Structure):
    """As in step.h, whose `Rows` are part of it."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("shape", "layers", "exit_shape", "exit")),
        ("num_rows", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("places", "seats", "row_tokens")),
        ("num_fronts", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("fronts", "outcomes")),
        *((name, ctypes.c_double) for name in ("layer_seconds", "router_seconds", "head_seconds")),
    )


class NativeSteps:
    """Over the tensors of a cache. Only for a model that `is_plain`."""

    def __init__(
        self,
        library: ctypes.CDLL,
        model: NviumForCausalLM,
        cache: PagedCache,
        *,
        max_sequences: int,
        threads: Threads | None = None,
    ) -> None:
        self._threads = threads or Threads.all()
        config, like = model.config, model.lm_head.weight
        self.run_native = getattr(library, f"run_{PRECISIONS[like.dtype]}")
        precise = torch.promote_types(like.dtype, torch.float32)
        positions = torch.arange(config.max_position_embeddings)
        cos_TP, sin_TP = (x.contiguous() for x in model.model.rotary(positions, precise))
        embedding = model.model.embed_tokens.weight.detach().contiguous()
        self._tensors = Pointers([cache.keys, cache.values, cos_TP, sin_TP, cache.states_NSD, embedding])
        store = Store(model, library.vector_bytes())
        self._layers = [store.block(block) for block in config.blocks]
        self.exits = store.exits()
        """Where the weights of each exit are."""
        self._exit_shape = ExitShape.of(model)
        self._shapes = [
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
        ]
        self.max_run_rows = MAX_RUN_ROWS
        """Rows of one sequence in a call."""
        self._seats = Seats(max_sequences)
        self._outcomes = bytearray(OUTCOME.size * max_sequences)
        self._outcomes_at = ctypes.addressof(ctypes.c_char.from_buffer(self._outcomes))
        self._steps = (NativeStep * config.num_exits)(*map(self._prepared, range(config.num_exits)))
        self._first_steps = [
            ctypes.byref(self._steps, block * ctypes.sizeof(NativeStep)) for block in range(config.num_exits)
        ]

    def suits(self, step: Step) -> bool:
        """Whether the native call is likely to be the faster one."""
        max_rows = self.max_run_rows
        if step.num_rows > max(MAX_STEP_ROWS, max_rows):
            return False
        return step.num_rows <= max_rows or max([len(run.rows) for run in step.runs]) <= max_rows

    def run(self, step: Step) -> list[StepResult]:
        """The Step, and those that follow it as far as they ran. Other fronts are left to the caller."""
        steps, native = [step], self._steps[step.block]
        fronts, kept = self._fill(native, step)
        are_complete = is_complete(step)
        following = step.following if are_complete else None
        while following is not None and (following.runs is step.runs or self.suits(following)):
            if following.runs is step.runs:
                self._fill_as(self._steps[following.block], native)
            else:
                kept += self._fill(self._steps[following.block], following)[1]
            steps.append(following)
            following = following.following if following.runs is step.runs or is_complete(following) else None
        threads = self._threads.of(step.num_rows)
        first, tensors = self._first_steps[step.block], self._tensors.array
        count = self.run_native(first, len(steps), step.goes_on_anyway, tensors, threads)
        return self._results(steps[:count], fronts, are_complete)

    def _prepared(self, block: int) -> NativeStep:
        """What is the same for all Steps of a block."""
        return NativeStep(
            shape=ctypes.addressof(self._shapes[block]),
            layers=ctypes.addressof(self._layers[block].array),
            exit_shape=ctypes.addressof(self._exit_shape),
            exit=ctypes.addressof(self.exits[block].array),
            seats=ctypes.addressof(self._seats.array),
            outcomes=self._outcomes_at,
        )

    def _fill(self, native: NativeStep, step: Step) -> tuple[list[Sequence], list[object]]:
        """Sequences whose fronts are routed, in order, and the numbers that the call reads, to be kept until then."""
        runs, seat_of = step.runs, self._seats.of
        numbers: list[int] = []
        for sequence, rows, _ in runs:
            seat = seat_of(sequence)
            for t in rows:
                numbers += (t, seat)
        num_rows = len(numbers) // 2
        if not step.block:
            for sequence, rows, _ in runs:
                numbers += sequence.token_ids[rows.start : rows.stop]
        at_fronts, row, fronts = len(numbers), -1, []
        for sequence, rows, reaches_front in runs:
            row += len(rows)
            if reaches_front and sequence.is_plain:
                numbers.append(row)
                fronts.append(sequence)
        kept = array("q", numbers)
        native.num_rows, native.num_fronts = num_rows, len(fronts)
        native.places = first = address(kept)
        native.row_tokens = None if step.block else first + 16 * num_rows
        native.fronts = first + 8 * at_fronts
        return fronts, [kept]

    def _fill_as(self, native: NativeStep, first: NativeStep) -> None:
        """The same rows in a later block."""
        native.num_rows, native.num_fronts = first.num_rows, first.num_fronts
        native.places, native.fronts = first.places, first.fronts

    def _results(self, steps: list[Step], fronts: list[Sequence], are_complete: bool) -> list[StepResult]:
        """Of Steps that ran, the first of which is complete or not. Each front has one decision, where it ended."""
        results = [
            self._result(step, are_complete if step.runs is steps[0].runs else is_complete(step)) for step in steps
        ]
        outcomes = OUTCOME.iter_unpack(memoryview(self._outcomes)[: OUTCOME.size * len(fronts)])
        decide_together(results, fronts, outcomes)
        return results

    def _result(self, step: Step, is_complete: bool) -> StepResult:
        native = self._steps[step.block]
        router, head = native.router_seconds, native.head_seconds
        return StepResult(step, {}, {}, {}, native.layer_seconds + router + head, router, head, is_complete)


def is_complete(step: Step) -> bool:
    """The call decides for every front that is reached."""
    return False not in [run.sequence.is_plain for run in step.runs if run.reaches_front]
