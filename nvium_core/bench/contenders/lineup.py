"""The contenders by name. Variants of a peer have names such as "llama.cpp/f16"; the fastest counts."""

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
from nvium_core.choices import Schedule, Weights
from nvium_core.engine.engine import Engine
from nvium_core.engine.params import require
from nvium_core.model.nvium import NviumForCausalLM

OURS: Schedule = "optimal"
SWEEP: Schedule = "sweep"
BASELINE: Schedule = "synchronous"
TWIN = "dense twin"
"""Our engine: with its own schedule, deepest first, dense, and with the dense twin."""

GENERATE, CONTINUOUS, LLAMA_CPP = "generate", "continuous", "llama.cpp"
"""The dense twin in other engines."""

GIVEN_FILE = "llama.cpp with the file"
"""That the model was read from, in whatever kinds of weights."""

OTHERS = SWEEP, TWIN, GENERATE, CONTINUOUS, LLAMA_CPP
"""Optional contenders; ours and the baseline always run."""


HALF_BYTES = 2
"""Of a number of 16 bits."""

QUANTIZED: dict[str, Kind] = {"q8": "q8_0", "q4": "q4_0"}
"""llama.cpp's name for our weights."""


def peer_of(name: str) -> str:
    return name.partition("/")[0]


@dataclass(frozen=True)
class Lineup:
    """What is needed to build the contenders: the twin, its GGUF files and, as None, the one that the model was read
    from; who takes part, and why the others do not."""

    subject: Subject
    twin: NviumForCausalLM
    invited: Collection[str] = OTHERS
    files: dict[Kind | None, Path] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    @contextmanager
    def ready(self, race: Race) -> Iterator[tuple[Engine, dict[str, Contender]]]:
        """Our engine, calibrated, and all contenders. It takes turns with its schedules: weights that lie elsewhere in
        memory can cost a tenth more or less."""
        engine = own.engine_for(self.subject.model, race, schedule=OURS)
        engine.calibrate()
        others = [name for name in (SWEEP, BASELINE) if name in {BASELINE, *self.invited}]
        policies = {OURS: engine.scheduler.policy} | {name: own.policy_for(engine, name) for name in others}
        contenders: dict[str, Contender] = {
            name: own.contender(engine, race, policy) for name, policy in policies.items()
        }
        with ExitStack() as stack:
            yield engine, contenders | self._with_the_twin(race, stack)

    def _with_the_twin(self, race: Race, stack: ExitStack) -> dict[str, Contender]:
        """Valid until the stack closes."""
        contenders: dict[str, Contender] = {}
        if TWIN in self.invited:  # its passes are launched ahead too, where ours are
            contenders[TWIN] = own.contender(own.engine_for(self.twin, race, schedule=BASELINE), race)
        if GENERATE in self.invited:
            contenders |= self._generating(race)
        if CONTINUOUS in self.invited:
            contenders[CONTINUOUS] = stack.enter_context(continuous.contender(usable_llama(self.twin), race))
        for kind, file in self.files.items():
            name, threads = f"{LLAMA_CPP}/{kind}" if kind else GIVEN_FILE, torch.get_num_threads()
            contenders[name] = stack.enter_context(llama_cpp.contender(file, kind, race, threads=threads))
        return contenders

    def _generating(self, race: Race) -> dict[str, Contender]:
        """With either cache, and in float32 too where a CPU may be slower with less."""
        llama = usable_llama(self.twin)
        variants = {f"{GENERATE}/{cache}": generate.contender(llama, race, cache) for cache in get_args(generate.Cache)}
        if llama.device.type == "cpu" and llama.dtype.itemsize == HALF_BYTES:
            variants[f"{GENERATE}/float32"] = generate.contender(usable_llama(self.twin).float(), race, "dynamic")
        return variants


@contextmanager
def lineup(subject: Subject, invited: Collection[str] = OTHERS) -> Iterator[Lineup]:
    """The files live as long as the context."""
    known = BASELINE, *OTHERS
    for name in invited:
        require(name in known, "against", f"must be among {', '.join(known)}, got {name!r}")
    found = Lineup(subject, dense_twin(subject.model, subject.weights), invited)
    with TemporaryDirectory() as folder:
        try:
            if LLAMA_CPP in invited:
                write_files(found, Path(folder))
        except NotAvailable as reason:
            found.left_out[LLAMA_CPP] = str(reason)
        yield found


def write_files(who: Lineup, folder: Path) -> None:
    """The twin for llama.cpp. Raises `NotAvailable` where it cannot run."""
    llama_cpp.check_available(who.subject.model.device.type)
    for kind in kinds(who.subject.model.dtype, who.subject.weights):
        write_gguf(who.twin, file := folder / f"{kind}.gguf", kind)
        who.files[kind] = file
    if who.subject.file:
        who.files[None] = who.subject.file


def kinds(dtype: torch.dtype, weights: Weights = "auto") -> tuple[Kind, ...]:
    """Files with as many bits: either kind of 16, or the most that there is."""
    if weights in QUANTIZED:
        return (QUANTIZED[weights],)
    return ("f16", "bf16") if dtype.itemsize == HALF_BYTES else ("f32",)
