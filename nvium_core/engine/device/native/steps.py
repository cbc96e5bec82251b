"""A Step in one native call: its rows through the block, and decisions for fronts that draw plainly and unsorted.

A Step that says which one follows goes on to that in the same call, as long as a front does.

Shapes: R rows, D width, S cache slots, F fronts.
"""

import ctypes
from array import array
from collections.abc import Sequence as Items
from itertools import accumulate, chain

import torch

from nvium_core.engine.device.native.library import PRECISIONS
from nvium_core.engine.device.native.threads import Threads
from nvium_core.engine.device.native.weights import ExitShape, Pointers, Store, address
from nvium_core.engine.device.paged_cache import PagedCache
from nvium_core.engine.schedule.sequence import Sequence
from nvium_core.engine.schedule.step import FrontDecision, Step, StepResult
from nvium_core.model.nvium import NviumForCausalLM

MAX_STEP_ROWS, MAX_RUN_ROWS = 128, 32
"""Rows of a Step, and of one sequence in it, that always run natively; for more, PyTorch's products may be faster."""

GOES_ON, NOT_ASKED = -2, -3
"""Stand in a token's place, as `NO_TOKEN` may."""


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
        *((name, ctypes.c_void_p) for name in ("places", "pages", "row_tokens")),
        ("num_fronts", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("fronts", "truncations", "log_w", "tokens")),
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
        self._max_sequences = max_sequences
        self._log_w = [array("d", bytes(16 * max_sequences)) for _ in config.blocks]
        self._tokens = [array("q", bytes(8 * max_sequences)) for _ in config.blocks]
        self._steps = (NativeStep * config.num_exits)(*map(self._prepared, range(config.num_exits)))

    def suits(self, step: Step) -> bool:
        """Whether the native call is likely to be the faster one."""
        max_rows = self.max_run_rows
        return step.num_rows <= max(MAX_STEP_ROWS, max_rows) and all(len(run.rows) <= max_rows for run in step.runs)

    def run(self, step: Step) -> list[StepResult]:
        """The Step, and those that follow it as far as they ran. Other fronts are left to the caller."""
        is_complete = False not in [is_native(sequence) for sequence, _, reaches in step.runs if reaches]
        steps = [step]
        while is_complete and (following := steps[-1].following) and self.suits(following):
            steps.append(following)
        fronts, *kept = self._fill(self._steps[step.block], step)
        for each in steps[1:]:
            if each.runs is step.runs:
                self._fill_as(self._steps[each.block], self._steps[step.block])
            else:
                kept += self._fill(self._steps[each.block], each)
        first = ctypes.byref(self._steps, step.block * ctypes.sizeof(NativeStep))
        threads = self._threads.of(step.num_rows)
        count = self.run_native(first, len(steps), step.goes_on_anyway, self._tensors.array, threads)
        return [self._result(each, fronts, is_complete=is_complete) for each in steps[:count]]

    def _prepared(self, block: int) -> NativeStep:
        """What is the same for all Steps of a block."""
        return NativeStep(
            shape=ctypes.addressof(self._shapes[block]),
            layers=ctypes.addressof(self._layers[block].array),
            exit_shape=ctypes.addressof(self._exit_shape),
            exit=ctypes.addressof(self.exits[block].array),
            log_w=address(self._log_w[block]),
            tokens=address(self._tokens[block]),
        )

    def _fill(self, native: NativeStep, step: Step) -> tuple[list[Sequence], "array[int]", "array[float]"]:
        """Sequences whose fronts are routed, in order, and the arrays that the call reads, to be kept until then."""
        runs, tables = step.runs, [run.sequence.pages for run in step.runs]
        starts = accumulate(map(len, tables[:-1]), initial=0)
        places = [word for run, start in zip(runs, starts, strict=True) for t in run.rows for word in (t, start)]
        pages = list(chain.from_iterable(tables))
        tokens = (
            list(chain.from_iterable([s.token_ids[r.start : r.stop] for s, r, _ in runs])) if not step.block else []
        )
        last_rows = accumulate([len(run.rows) for run in runs], initial=-1)
        next(last_rows)
        asked = [(row, s) for row, (s, _, reaches) in zip(last_rows, runs, strict=True) if reaches and is_native(s)]
        fronts = [word for row, s in asked for word in (row, s.seed, s.choice)]
        assert len(asked) <= self._max_sequences
        whole = array("q", places + pages + tokens + fronts)
        real = array("d", [word for _, s in asked for word in s.draw[:2]])
        native.num_rows, native.num_fronts = len(places) // 2, len(asked)
        native.places = first = address(whole)
        native.pages = first = first + 8 * len(places)
        first += 8 * len(pages)
        native.row_tokens = first if tokens else None
        native.fronts = first + 8 * len(tokens)
        native.truncations = address(real)
        return [s for _, s in asked], whole, real

    def _fill_as(self, native: NativeStep, first: NativeStep) -> None:
        """The same rows in a later block."""
        native.num_rows, native.num_fronts = first.num_rows, first.num_fronts
        native.places, native.pages, native.fronts = first.places, first.pages, first.fronts
        native.truncations = first.truncations

    def _result(self, step: Step, fronts: Items[Sequence], *, is_complete: bool) -> StepResult:
        """The decisions of fronts that were routed; `is_complete`: there are no others."""
        native, block = self._steps[step.block], step.block
        tokens, log_w = self._tokens[block], self._log_w[block]
        router, head = native.router_seconds, native.head_seconds
        seconds = native.layer_seconds + router + head
        decisions = {
            sequence: FrontDecision(None if token == GOES_ON else token, log_w[2 * f + 1], log_w[2 * f])
            for f, (sequence, token) in enumerate(zip(fronts, tokens, strict=False))
            if token != NOT_ASKED
        }
        return StepResult(
            step, decisions, seconds=seconds, router_seconds=router, head_seconds=head, is_complete=is_complete
        )


def is_native(sequence: Sequence) -> bool:
    """Whether its tokens are drawn in the call."""
    return sequence.draws_directly
