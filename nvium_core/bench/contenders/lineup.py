"""Chooses and builds the contenders of `nvium bench peers`.

A contender may have variants, such as "llama.cpp/f16" and "llama.cpp/bf16". Ours is compared with the fastest variant.
A model from a GGUF file has no twin: llama.cpp runs the file itself.
"""

from collections.abc import Collection, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from nvium_core.bench.contenders import llama_cpp, own
from nvium_core.bench.contenders.contender import Contender, ContenderFailed, NotAvailable, Workload
from nvium_core.bench.contenders.gguf_file import FileKind, write_gguf
from nvium_core.bench.contenders.llama_library import builds
from nvium_core.bench.figures import Figures
from nvium_core.bench.harness import Subject
from nvium_core.bench.interference import watched
from nvium_core.bench.twin import dense_twin
from nvium_core.choices import Schedule, Weights
from nvium_core.engine.validation import require
from nvium_core.model.nvium import Nvium

OURS: Schedule = "race"
SWEEP: Schedule = "sweep"
BASELINE: Schedule = "whole"
TWIN = "dense twin"
"""Contenders in our engine: the model with the schedules `race`, `sweep` and `whole` (full depth), and its twin."""

LLAMA_CPP = "llama.cpp"  # with the dense twin
GIVEN_FILE = "llama.cpp/file"  # llama.cpp with the GGUF file that the model was loaded from
UNPACKED = ", degraded: use_extra_bufts=False"  # added to the name if llama.cpp crashes when it repacks weights
OTHERS = SWEEP, TWIN, LLAMA_CPP  # optional contenders; `race` and `whole` always run

QUANTIZED: dict[str, FileKind] = {"q8": "q8_0", "q4": "q4_0"}  # our `--weights` → GGUF type


@dataclass(frozen=True)
class Lineup:
    """The contenders of an experiment.

    selected: names of the optional contenders.
    files: GGUF type → file with the twin. None → the GGUF file that the model was loaded from.
    builds: contender in llama.cpp → its build, and whether it is degraded.
    left_out: contender that cannot run → the reason.
    """

    subject: Subject
    twin: Nvium | None
    selected: Collection[str] = OTHERS
    files: dict[FileKind | None, Path] = field(default_factory=dict)
    builds: dict[str, Figures] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    @contextmanager
    def ready(self, workload: Workload) -> Iterator[dict[str, Contender]]:
        """Yield all contenders by name. Of our schedules, only `whole` runs a workload of a prompt alone.

        All schedules share one engine. A second engine with the same weights could differ in speed by 10%, because its
        weights have another address.
        """
        engine = own.engine_for(self.subject.model, workload)
        names = {OURS, BASELINE, *self.selected} if workload.num_tokens > 1 else {BASELINE}
        schedules = [name for name in (OURS, SWEEP, BASELINE) if name in names]
        contenders: dict[str, Contender] = {name: own.contender(engine, workload, name) for name in schedules}
        with ExitStack() as stack:
            if self.twin is not None and TWIN in self.selected:
                contenders[TWIN] = own.contender(own.engine_for(self.twin, workload), workload, BASELINE)
            contenders |= self._in_llama_cpp(workload, stack)
            is_on_cpu = self.subject.model.device.type == "cpu"
            yield {name: watched(each) if is_on_cpu else each for name, each in contenders.items()}

    def _in_llama_cpp(self, workload: Workload, stack: ExitStack) -> dict[str, Contender]:
        """Start every build of llama.cpp with each file. If all crash when they repack weights, start them without."""
        contenders: dict[str, Contender] = {}
        for kind in self.files:
            runs = partial(self._builds_of, kind, workload, stack)
            contenders |= runs(repacks=True) or runs(repacks=False)
        return contenders

    def _builds_of(
        self, kind: FileKind | None, workload: Workload, stack: ExitStack, *, repacks: bool
    ) -> dict[str, Contender]:
        """Start the builds of llama.cpp that run. A first turn shows whether they crash. Closing `stack` ends them."""
        contenders: dict[str, Contender] = {}
        for label, folder in builds().items():
            parts = (f"{LLAMA_CPP}/{kind}" if kind else GIVEN_FILE, label)
            name = ", ".join(filter(None, parts)) + ("" if repacks else UNPACKED)
            arguments = folder, self.files[kind], kind, workload, torch.get_num_threads()
            try:
                process = stack.enter_context(closing(llama_cpp.Process(*arguments, repacks=repacks)))
                process(0)
            except ContenderFailed as failure:
                self.left_out[name] = str(failure)
            else:
                contenders[name] = process
                self.builds[name] = {**process.description, "is_degraded": not repacks}
        return contenders


@contextmanager
def lineup(subject: Subject, selected: Collection[str] = OTHERS) -> Iterator[Lineup]:
    """Yield the chosen contenders. Their GGUF files exist only within this context."""
    known = BASELINE, *OTHERS
    for name in selected:
        require(name in known, "against", f"must be one or more of {', '.join(known)}, got {name!r}")
    twin = None if subject.file else dense_twin(subject.model, subject.weights)
    found = Lineup(subject, twin, selected)
    with TemporaryDirectory() as folder:
        try:
            if LLAMA_CPP in selected:
                write_files(found, Path(folder))
        except NotAvailable as reason:
            found.left_out[LLAMA_CPP] = str(reason)
        yield found


def write_files(contenders: Lineup, folder: Path) -> None:
    """List the given GGUF file in `contenders`, or write the twin's. Raise `NotAvailable` if llama.cpp cannot run."""
    subject = contenders.subject
    llama_cpp.check_available(subject.model.device.type)
    if contenders.twin is None:
        contenders.files[None] = subject.file or Path()
        return
    for kind in kinds(subject.model.dtype, subject.weights):
        write_gguf(contenders.twin, file := folder / f"{kind}.gguf", kind)
        contenders.files[kind] = file


def kinds(dtype: torch.dtype, weights: Weights = "auto") -> tuple[FileKind, ...]:
    """Return the GGUF types that have as many bits as our weights. For 16 bits these are f16 and bf16."""
    if weights in QUANTIZED:
        return (QUANTIZED[weights],)
    return ("f16", "bf16") if dtype.itemsize == 2 else ("f32",)
