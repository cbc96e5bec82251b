"""Who races, by name. A peer that comes in several variants has names such as "llama.cpp/f16"; its best counts."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import get_args

import torch

from nvium_core.bench.contenders import continuous, generate, llama_cpp, own
from nvium_core.bench.contenders.contender import Contender, NotAvailable, Race
from nvium_core.bench.contenders.gguf_file import Kind, write_gguf
from nvium_core.bench.harness import Subject
from nvium_core.bench.twin import dense_twin, usable_llama
from nvium_core.engine.engine import Engine
from nvium_core.model.nvium import NviumForCausalLM

OURS, BASELINE, TWIN = "optimal", "synchronous", "dense twin"
"""Our engine: with its own schedule, with the dense one, and with the twin."""

GENERATE, CONTINUOUS, LLAMA_CPP = "generate", "continuous", "llama.cpp"
"""The twin elsewhere."""


def peer_of(name: str) -> str:
    """Whose variant a contender is."""
    return name.partition("/")[0]


@dataclass(frozen=True)
class Lineup:
    """What can race with a model: its twin, that in GGUF files, and why who is left out is."""

    subject: Subject
    twin: NviumForCausalLM
    files: dict[Kind, Path] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    @contextmanager
    def ready(self, race: Race) -> Iterator[tuple[Engine, dict[str, Contender]]]:
        """Our engine, calibrated, and all contenders."""
        engine = own.engine_for(self.subject.model, race, schedule=OURS)
        engine.calibrate()
        dense_schedule = own.engine_for(self.subject.model, race, schedule=BASELINE)
        contenders = {
            OURS: own.contender(engine, race),
            BASELINE: own.contender(dense_schedule, race),
            TWIN: own.contender(own.engine_for(self.twin, race), race),
        }
        for cache in get_args(generate.Cache):
            contenders[f"{GENERATE}/{cache}"] = generate.contender(usable_llama(self.twin), race, cache)
        with ExitStack() as stack:
            contenders[CONTINUOUS] = stack.enter_context(continuous.contender(usable_llama(self.twin), race))
            for kind, file in self.files.items():
                name, threads = f"{LLAMA_CPP}/{kind}", torch.get_num_threads()
                contenders[name] = stack.enter_context(llama_cpp.contender(file, kind, race, threads=threads))
            yield engine, contenders


@contextmanager
def lineup(subject: Subject) -> Iterator[Lineup]:
    """For as long as the files are needed."""
    found = Lineup(subject, dense_twin(subject.model))
    with TemporaryDirectory() as folder:
        try:
            llama_cpp.check_available(subject.model.device.type)
            for kind in kinds(subject.model.dtype):
                write_gguf(found.twin, file := Path(folder) / f"{kind}.gguf", kind)
                found.files[kind] = file
        except NotAvailable as reason:
            found.left_out[LLAMA_CPP] = str(reason)
        yield found


def kinds(dtype: torch.dtype) -> tuple[Kind, ...]:
    """The files of a precision: either way of 16 bits, or the most that there is."""
    return ("f16", "bf16") if dtype.itemsize == 2 else ("f32",)
