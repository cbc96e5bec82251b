"""Who races, by name. A peer that comes in several variants has names such as "llama.cpp/f16"; its best counts."""

from collections.abc import Collection, Iterator
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
from nvium_core.choices import Schedule
from nvium_core.engine.engine import Engine
from nvium_core.engine.params import require
from nvium_core.model.nvium import NviumForCausalLM

OURS: Schedule = "optimal"
SWEEP: Schedule = "sweep"
BASELINE: Schedule = "synchronous"
TWIN = "dense twin"
"""Our engine: with its own schedule, deepest first, with the dense one, and with the twin."""

GENERATE, CONTINUOUS, LLAMA_CPP = "generate", "continuous", "llama.cpp"
"""The twin elsewhere."""

OTHERS = SWEEP, TWIN, GENERATE, CONTINUOUS, LLAMA_CPP
"""Who races only if invited; ours and the baseline always do."""


def peer_of(name: str) -> str:
    """Whose variant a contender is."""
    return name.partition("/")[0]


@dataclass(frozen=True)
class Lineup:
    """What can race with a model: its twin, that in GGUF files, who was invited, and why who is left out is."""

    subject: Subject
    twin: NviumForCausalLM
    invited: Collection[str] = OTHERS
    files: dict[Kind, Path] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    @contextmanager
    def ready(self, race: Race) -> Iterator[tuple[Engine, dict[str, Contender]]]:
        """Our engine, calibrated, and all contenders."""
        schedules = [name for name in (OURS, SWEEP, BASELINE) if name in {OURS, BASELINE, *self.invited}]
        engines = {name: own.engine_for(self.subject.model, race, schedule=name) for name in schedules}
        engines[OURS].calibrate()
        contenders: dict[str, Contender] = {name: own.contender(engine, race) for name, engine in engines.items()}
        with ExitStack() as stack:
            yield engines[OURS], contenders | self._with_the_twin(race, stack)

    def _with_the_twin(self, race: Race, stack: ExitStack) -> dict[str, Contender]:
        """Those invited, for as long as the stack stands."""
        contenders: dict[str, Contender] = {}
        if TWIN in self.invited:
            contenders[TWIN] = own.contender(own.engine_for(self.twin, race), race)
        if GENERATE in self.invited:
            for cache in get_args(generate.Cache):
                contenders[f"{GENERATE}/{cache}"] = generate.contender(usable_llama(self.twin), race, cache)
        if CONTINUOUS in self.invited:
            contenders[CONTINUOUS] = stack.enter_context(continuous.contender(usable_llama(self.twin), race))
        for kind, file in self.files.items():
            name, threads = f"{LLAMA_CPP}/{kind}", torch.get_num_threads()
            contenders[name] = stack.enter_context(llama_cpp.contender(file, kind, race, threads=threads))
        return contenders


@contextmanager
def lineup(subject: Subject, invited: Collection[str] = OTHERS) -> Iterator[Lineup]:
    """For as long as the files are needed."""
    known = BASELINE, *OTHERS
    for name in invited:
        require(name in known, "against", f"must be among {', '.join(known)}, got {name!r}")
    found = Lineup(subject, dense_twin(subject.model), invited)
    with TemporaryDirectory() as folder:
        try:
            if LLAMA_CPP in invited:
                write_files(found, Path(folder))
        except NotAvailable as reason:
            found.left_out[LLAMA_CPP] = str(reason)
        yield found


def write_files(who: Lineup, folder: Path) -> None:
    """The twin for llama.cpp. Raises `NotAvailable` where that cannot race."""
    llama_cpp.check_available(who.subject.model.device.type)
    for kind in kinds(who.subject.model.dtype):
        write_gguf(who.twin, file := folder / f"{kind}.gguf", kind)
        who.files[kind] = file


def kinds(dtype: torch.dtype) -> tuple[Kind, ...]:
    """The files of a precision: either way of 16 bits, or the most that there is."""
    return ("f16", "bf16") if dtype.itemsize == 2 else ("f32",)
