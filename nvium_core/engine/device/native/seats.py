"""What native calls know of running sequences, seat by seat: renewed when that changes, not with every Step."""

import ctypes
from array import array

from nvium_core.engine.device.native.weights import address
from nvium_core.engine.schedule.sequence import Sequence


class NativeSeat(ctypes.Structure):
    """`Seat` of block.h."""

    _fields_ = (
        ("pages", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("seed", "choice")),
        *((name, ctypes.c_double) for name in ("temperature", "log_min_p", "top_k", "top_p")),
    )


class Seats:
    def __init__(self, count: int) -> None:
        self.array = (NativeSeat * count)()
        self._known: list[tuple[object, ...]] = [()] * count
        self._pages = [array("q")] * count

    def of(self, sequence: Sequence) -> int:
        """The sequence's seat, where its pages and draws are up to date. An admission gives it a new list of pages,
        which then only grows."""
        seat = sequence.seat
        assert seat is not None
        known = sequence.pages, len(sequence.pages), sequence.seed, sequence
        if known != self._known[seat]:
            self._known[seat] = known
            self._pages[seat] = pages = array("q", sequence.pages)
            self.array[seat] = NativeSeat(address(pages), sequence.seed, sequence.choice, *sequence.draw[:4])
        return seat
