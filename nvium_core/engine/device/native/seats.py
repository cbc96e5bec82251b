"""Seats for native calls: pages, tokens and sampling parameters of running sequences. Only changes are rewritten."""

from array import array
from typing import Any
from weakref import ref

from nvium_core.engine.config import MAX_DRAFTS
from nvium_core.engine.device.native.structs import struct
from nvium_core.engine.device.native.weights import address
from nvium_core.engine.schedule.logit_changes import NUM_FIELDS
from nvium_core.engine.schedule.sequence import Sequence

MAX_EMISSIONS = max(32, MAX_DRAFTS + 1)  # maximum tokens that one run emits in a call


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
