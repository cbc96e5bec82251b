"""A backend that runs its calls in another process: it sends an image of their memory and reads it back."""

import ctypes
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from nvium_core.engine.device.native.backend import NativeBackend
from nvium_core.engine.device.native.weights import Packed, address
from nvium_core.engine.schedule.step import Step, StepResult

Region = tuple[int, int]
"""Address and number of bytes."""


class ReplayedBackend(NativeBackend):
    """Runs a float32 model. `command` starts driver.cpp's program, compiled for vectors of `vector_bytes`."""

    command: list[str]
    file: Path
    vector_bytes: int

    def run(self, step: Step, max_rows: int) -> StepResult:
        self._run_native = lambda *_: self._replay()
        return super().run(step, max_rows)

    def _replay(self) -> None:
        parts = [*((region, True) for region in self._structures()), *((region, False) for region in self._data())]
        places, image = dict[Region, int](), bytearray()
        for region, _ in parts:
            start, size = region
            image += bytes((start - len(image)) % 64)
            places[region] = len(image)
            image += ctypes.string_at(start, size)
        image += bytes(-len(image) % 64)
        pointers = [
            (places[region] + at, places[target] + word - target[0])
            for region, has_pointers in parts
            if has_pointers
            for at, word in enumerate_words(region)
            for target in places
            if target[0] <= word < target[0] + target[1]
        ]
        model, call = (places[region_of(each)] for each in (self._model, self._call))
        header = struct.pack("<5q", self.vector_bytes, len(image), len(pointers), model, call)
        before = header + b"".join(struct.pack("<2q", *pointer) for pointer in pointers)
        self.file.write_bytes(before + image)
        subprocess.run([*self.command, str(self.file)], check=True)
        after = self.file.read_bytes()[len(before) :]
        for (start, size), place in places.items():
            ctypes.memmove(start, after[place : place + size], size)

    def _structures(self) -> Iterator[Region]:
        """Memory that contains pointers."""
        layers, exits = self._weights
        for each in (self._model, self._call, layers.array, exits.array, self._seats.array):
            yield region_of(each)
        yield region_of(self._runs)

    def _data(self) -> Iterator[Region]:
        """Memory without pointers."""
        weights = [weight for structs in self._weights for each in structs.weights for weight in each.values()]
        tensors = [weight.data if isinstance(weight, Packed) else weight for weight in weights]
        tensors += [*self._tensors.values(), self._cache.keys, self._cache.values]
        yield from {(tensor.data_ptr(), tensor.nbytes) for tensor in tensors if isinstance(tensor, Tensor)}
        yield region_of(self._calls)
        yield region_of(self._emissions)
        yield region_of(self._reports)
        arrays = [self._first_calls, self._filled, self._scores]
        for memory in self._seats.memory:
            if memory is not None:
                arrays += [memory.pages, memory.tokens, memory.stops, memory.changes]
        yield from ((address(each), len(each) * each.itemsize) for each in arrays if len(each))


def region_of(part: Any) -> Region:
    return ctypes.addressof(part), ctypes.sizeof(part)


def enumerate_words(region: Region) -> Iterator[tuple[int, int]]:
    for number, (word,) in enumerate(struct.iter_unpack("<q", ctypes.string_at(*region))):
        yield 8 * number, word
