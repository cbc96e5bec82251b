"""Chooses and builds the contenders of `nvium bench peers`.

A contender may have variants, such as "llama.cpp/f16" and "llama.cpp/bf16". Ours is compared with the fastest variant.
"""

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import get_args

import torch

from nvium_core.bench.contenders import generate, llama_cpp, own
from nvium_core.bench.contenders.contender import Contender, NotAvailable, Workload
from nvium_core.bench.contenders.gguf_file import Kind, write_gguf
from nvium_core.bench.harness import Subject
from nvium_core.bench.twin import dense_twin, usable_llama
from nvium_core.choices import Schedule, Weights
from nvium_core.engine.params import require
from nvium_core.model.nvium import Nvium
from nvium_core.model.stored import materialise

OURS: Schedule = "race"
SWEEP: Schedule = "sweep"
BASELINE: Schedule = "whole"
TWIN = "dense twin"
"""Contenders in our engine: the model with the schedules `race`, `sweep` and `whole` (full depth), and its twin."""

GENERATE, LLAMA_CPP = "generate", "llama.cpp"  # the dense twin in transformers and in llama.cpp
GIVEN_FILE = "llama.cpp with the file"  # llama.cpp with the GGUF file that the model was loaded from
OTHERS = SWEEP, TWIN, GENERATE, LLAMA_CPP  # optional contenders; `race` and `whole` always run

HALF_BYTES = 2

QUANTIZED: dict[str, Kind] = {"q8": "q8_0", "q4": "q4_0"}  # our `--weights` → GGUF type


@dataclass(frozen=True)
class Lineup:
    """The contenders of an experiment.

    selected: names of the optional contenders.
    files: GGUF type → file with the twin. None → the GGUF file that the model was loaded from.
    left_out: contender that cannot run → the reason.
    """

    subject: Subject
    twin: Nvium
    selected: Collection[str] = OTHERS
    files: dict[Kind | None, Path] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    @contextmanager
    def ready(self, workload: Workload) -> Iterator[dict[str, Contender]]:
        """Yield all contenders by name.

        All schedules share one engine. A second engine with the same weights could differ in speed by 10%, because its
        weights have another address.
        """
        engine = own.engine_for(self.subject.model, workload)
        schedules = [name for name in (OURS, SWEEP, BASELINE) if name in {OURS, BASELINE, *self.selected}]
        contenders: dict[str, Contender] = {name: own.contender(engine, workload, name) for name in schedules}
        with ExitStack() as stack:
            yield contenders | self._with_the_twin(workload, stack)

    def _with_the_twin(self, workload: Workload, stack: ExitStack) -> dict[str, Contender]:
        """Build the contenders that run the twin or the given GGUF file. Closing `stack` frees llama.cpp's memory."""
        contenders: dict[str, Contender] = {}
        if TWIN in self.selected:
            contenders[TWIN] = own.contender(own.engine_for(self.twin, workload), workload, BASELINE)
        if GENERATE in self.selected:
            contenders |= self._generating(workload)
        for kind, file in self.files.items():
            name, threads = f"{LLAMA_CPP}/{kind}" if kind else GIVEN_FILE, torch.get_num_threads()
            contenders[name] = stack.enter_context(llama_cpp.contender(file, kind, workload, threads=threads))
        return contenders

    def _generating(self, workload: Workload) -> dict[str, Contender]:
        """Build `generate` with each kind of KV cache.

        For 16-bit weights on a CPU, also build `generate` in float32, which may be faster than 16 bits there.
        """
        materialise(self.twin)
        llama, caches = usable_llama(self.twin), get_args(generate.Cache)
        variants = {f"{GENERATE}/{cache}": generate.contender(llama, workload, cache) for cache in caches}
        if llama.device.type == "cpu" and llama.dtype.itemsize == HALF_BYTES:
            variants[f"{GENERATE}/float32"] = generate.contender(usable_llama(self.twin).float(), workload, "dynamic")
        return variants


@contextmanager
def lineup(subject: Subject, selected: Collection[str] = OTHERS) -> Iterator[Lineup]:
    """Yield the chosen contenders. Their GGUF files exist only within this context."""
    known = BASELINE, *OTHERS
    for name in selected:
        require(name in known, "against", f"must be one or more of {', '.join(known)}, got {name!r}")
    found = Lineup(subject, dense_twin(subject.model, subject.weights), selected)
    with TemporaryDirectory() as folder:
        try:
            if LLAMA_CPP in selected:
                write_files(found, Path(folder))
        except NotAvailable as reason:
            found.left_out[LLAMA_CPP] = str(reason)
        yield found


def write_files(contenders: Lineup, folder: Path) -> None:
    """Write the twin's GGUF files and list them in `contenders`. Raise `NotAvailable` if llama.cpp cannot run."""
    subject = contenders.subject
    llama_cpp.check_available(subject.model.device.type)
    for kind in kinds(subject.model.dtype, subject.weights):
        write_gguf(contenders.twin, file := folder / f"{kind}.gguf", kind)
        contenders.files[kind] = file
    if subject.file:
        contenders.files[None] = subject.file


def kinds(dtype: torch.dtype, weights: Weights = "auto") -> tuple[Kind, ...]:
    """Return the GGUF types that have as many bits as our weights. For 16 bits these are f16 and bf16."""
    if weights in QUANTIZED:
        return (QUANTIZED[weights],)
    return ("f16", "bf16") if dtype.itemsize == HALF_BYTES else ("f32",)
