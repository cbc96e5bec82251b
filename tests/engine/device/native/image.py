"""An image of memory for driver.cpp: a Step of each block and scores of all rows, for vectors of any width."""

import struct
from array import array
from collections.abc import Iterable
from typing import NamedTuple, cast

import torch
from torch import Tensor

from nvium_core.engine.device.native.packing import Packed
from nvium_core.engine.device.native.steps import OUTCOME, NativeSteps
from nvium_core.engine.device.native.weights import Pointers
from nvium_core.engine.device.paged_cache import PagedCache
from nvium_core.engine.schedule.kv_cache import slots
from nvium_core.engine.schedule.sequence import Sequence
from nvium_core.model.nvium import NviumForCausalLM


class At(NamedTuple):
    """A place in the image, which becomes a pointer."""

    offset: int


class VectorsOf:
    """What `NativeSteps` asks of a library: nothing is called."""

    def __init__(self, vector_bytes: int) -> None:
        self._vector_bytes = vector_bytes

    def vector_bytes(self) -> int:
        return self._vector_bytes

    run_float32 = None


class Image:
    def __init__(self) -> None:
        self.memory = bytearray(64)
        self.relocations: list[int] = []

    def put(self, content: bytes) -> At:
        """Aligned as the widest vectors are."""
        self.memory += bytes(-len(self.memory) % 64)
        place = At(len(self.memory))
        self.memory += content
        return place

    def words(self, words: Iterable[int | At]) -> At:
        words = list(words)
        place = self.put(struct.pack(f"<{len(words)}q", *(w.offset if isinstance(w, At) else w for w in words)))
        self.relocations += [place.offset + 8 * i for i, word in enumerate(words) if isinstance(word, At)]
        return place

    def tensor(self, tensor: Tensor | bool | None) -> int | At:
        """Or what stands for itself."""
        if tensor is None or isinstance(tensor, bool):
            return int(tensor or False)
        return self.put(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())

    def pointers(self, pointers: Pointers) -> At:
        words: list[int | At] = []
        for weight in pointers._kept:
            if isinstance(weight, Packed):
                words.append(weight.kind)
            words.append(self.tensor(weight.data if isinstance(weight, Packed) else weight))
        return self.words(words)

    def written(self, vector_bytes: int, call: At) -> bytes:
        self.memory += bytes(-len(self.memory) % 64)
        header = [vector_bytes, len(self.memory), len(self.relocations), call.offset, *self.relocations]
        return struct.pack(f"<{len(header)}q", *header) + bytes(self.memory)


class Ran(NamedTuple):
    """States behind every block [N, S, D]; each front's block and token; rows' scores."""

    states: Tensor
    emissions: list[tuple[int, int]]
    logprobs: list[float]
    top: list[list[int]]
    exit_probabilities: list[list[float]]


class Program:
    """All rows of the sequences through every block of a float32 model, and their scores with alternatives."""

    def __init__(
        self, model: NviumForCausalLM, cache: PagedCache, sequences: list[Sequence], num_top: int, vector_bytes: int
    ) -> None:
        self._vector_bytes, self._num_top, self._sequences, self._cache = vector_bytes, num_top, sequences, cache
        self._num_rows = sum(sequence.num_tokens for sequence in sequences)
        self._steps = NativeSteps(VectorsOf(vector_bytes), model, cache, max_sequences=8)  # type: ignore[arg-type]
        self._num_blocks = model.config.num_exits
        self._image = image = Image()
        keys, values, cos, sin, states, embedding = map(image.tensor, self._steps._tensors._kept)  # type: ignore[arg-type]
        assert isinstance(states, At)
        self._states = states
        tensors = image.words([keys, values, cos, sin, states, embedding])
        exits = [image.pointers(exit_) for exit_ in self._steps.exits]
        self._outcomes = image.put(bytes(OUTCOME.size * len(sequences)))
        self._found = [image.put(bytes(8 * self._num_rows * count)) for count in (1, num_top, num_top, len(exits))]
        steps = self._put_steps(exits)
        self._call = image.words([steps, self._num_blocks, tensors, 1, image.words(exits), self._put_scores()])

    def _put_steps(self, exits: list[At]) -> At:
        image, sequences, num_rows = self._image, self._sequences, self._num_rows
        fronts = [sum(s.num_tokens for s in sequences[: number + 1]) - 1 for number in range(len(sequences))]
        at_places, at_rows, at_fronts = (
            image.put(array("q", numbers).tobytes())
            for numbers in (
                [number for s in sequences for t in range(s.num_tokens) for number in (t, cast(int, s.seat))],
                [token for s in sequences for token in s.token_ids],
                fronts,
            )
        )
        at_seats = image.words(word for sequence in sequences for word in self._seat(sequence))
        exit_shape = image.put(bytes(self._steps._exit_shape))
        words: list[int | At] = []
        for block, exit_ in enumerate(exits):
            shape, layers = image.put(bytes(self._steps._shapes[block])), image.pointers(self._steps._layers[block])
            words += [shape, layers, exit_shape, exit_, num_rows, at_places, at_seats, 0 if block else at_rows]
            words += [len(sequences), at_fronts, self._outcomes, 0, 0, 0]
        return image.words(words)

    def _seat(self, sequence: Sequence) -> list[int | At]:
        """Sequences sit in order."""
        draws = struct.unpack("<4q", struct.pack("<4d", *sequence.draw[:4]))
        return [self._image.put(array("q", sequence.pages).tobytes()), sequence.seed, sequence.choice, *draws]

    def _put_scores(self) -> At:
        every = [s for each in self._sequences for s in slots(each, range(each.num_tokens), self._cache.page_size)]
        targets = [(7 * slot) % 17 for slot in every]
        asked = [self._image.put(array("q", numbers).tobytes()) for numbers in (every, targets)]
        return self._image.words([self._num_rows, *asked, self._num_top, *self._found])

    def written(self, num_threads: int) -> bytes:
        self._image.memory[self._call.offset + 24 : self._call.offset + 32] = struct.pack("<q", num_threads)
        return self._image.written(self._vector_bytes, self._call)

    def read(self, image: bytes) -> Ran:
        memory = image[8 * (4 + len(self._image.relocations)) :]

        def numbers(kind: str, place: At, count: int) -> list[float]:
            return list(struct.unpack_from(f"<{count}{kind}", memory, place.offset))

        shape = self._cache.states_NSD.shape
        states = torch.frombuffer(
            bytearray(memory), dtype=torch.float32, count=shape.numel(), offset=self._states.offset
        )
        size, start = OUTCOME.size * len(self._sequences), self._outcomes.offset
        emissions = [(block, token) for block, token, *_ in OUTCOME.iter_unpack(memory[start : start + size])]

        def by_row(kind: str, place: At, length: int) -> list[list[float]]:
            flat = numbers(kind, place, self._num_rows * length)
            return [flat[at : at + length] for at in range(0, len(flat), length)]

        logprobs = numbers("d", self._found[0], self._num_rows)
        top = [[int(token) for token in row] for row in by_row("q", self._found[1], self._num_top)]
        exit_probabilities = by_row("d", self._found[3], self._num_blocks)
        return Ran(states.view(shape).clone(), emissions, logprobs, top, exit_probabilities)
