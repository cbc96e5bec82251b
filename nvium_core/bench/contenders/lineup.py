"""Our engine as a contender, and the choice of the contenders of `nvium bench peers`.

A contender may have variants, such as "llama.cpp/f16" and "llama.cpp/bf16". Ours is compared with the fastest variant.
A model from a GGUF file has no twin: llama.cpp runs the file itself.
"""

from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from nvium_core.bench.contenders import llama_cpp
from nvium_core.bench.contenders.contender import (
    Contender,
    ContenderFailed,
    Generation,
    NotAvailable,
    Workload,
    watched,
)
from nvium_core.bench.contenders.gguf_file import FileKind, write_gguf
from nvium_core.bench.contenders.llama_cpp import builds
from nvium_core.bench.figures import Figures
from nvium_core.bench.harness import Subject, timed
from nvium_core.bench.shapes import dense_twin
from nvium_core.choices import Schedule, Weights
from nvium_core.engine.config import EngineConfig
from nvium_core.engine.device.paged_cache import best_page_size
from nvium_core.engine.engine import Engine
from nvium_core.engine.errors import require
from nvium_core.engine.sampling_params import SamplingParams
from nvium_core.engine.schedule.step import policies_of
from nvium_core.engine.schedule.tuner import Tuner
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

WARM_UP_TURNS, WARM_UP_TOKENS = 2, 320
"""Warm-up of the schedule `race`: turns, and tokens per sequence. Afterwards `race` has chosen its faster schedule."""


def workloads(subject: Subject, sequences: Iterable[int], tokens: int) -> list[Workload]:
    """Return a workload for each number in `sequences`. Raise `InvalidRequest` if `tokens` exceeds the context."""
    room = subject.context - len(subject.prompt)
    require(tokens <= room, "tokens", f"must be at most {room}, the context after the prompt, got {tokens}")
    return [Workload(prompt=subject.prompt, num_sequences=number, num_tokens=tokens) for number in sequences]


def engine_for(model: Nvium, workload: Workload, *others: Workload) -> Engine:
    """Build an engine without prefix caching. Its KV cache has room for all sequences of the workload.

    Also for `others`, which need no warm-up.
    """
    page_size = best_page_size(model.device)

    def cache_tokens(each: Workload, num_positions: int) -> int:
        return each.num_sequences * (-(-num_positions // page_size) + 1) * page_size

    warm = max(workload.num_positions, len(workload.prompt) + WARM_UP_TOKENS)
    room = max(cache_tokens(workload, warm), *(cache_tokens(each, each.num_positions) for each in others), 0)
    max_sequences = max(each.num_sequences for each in (workload, *others))
    return Engine(model, EngineConfig(max_sequences=max_sequences, cache_tokens=room, prefix_caching=False))


def contender(engine: Engine, workload: Workload, schedule: Schedule) -> Contender:
    """Return a contender that runs `engine` with `schedule`. It samples from the exits at temperature 1.

    With `race`, a warm-up runs here, so that `race` has chosen a schedule before the first turn. Contenders that share
    an engine choose independently.
    """
    policies = policies_of(schedule, engine.scheduler.num_blocks, is_tied=engine.scheduler.is_tied)
    tuner = Tuner(policies, first_pause=0)

    def generate(turn: int, num_tokens: int) -> Generation:
        engine.scheduler.schedules = tuner
        params = partial(SamplingParams, sampling="exits", max_tokens=num_tokens, ignore_eos=True)
        return timed(engine, [(workload.prompt, params(seed=seed)) for seed in workload.seeds(turn)])

    for turn in range(WARM_UP_TURNS if len(policies) > 1 else 0):
        generate(turn, min(WARM_UP_TOKENS, engine.context - len(workload.prompt)))
    return partial(generate, num_tokens=workload.num_tokens)


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
        engine = engine_for(self.subject.model, workload)
        names = {OURS, BASELINE, *self.selected} if workload.num_tokens > 1 else {BASELINE}
        schedules = [name for name in (OURS, SWEEP, BASELINE) if name in names]
        contenders: dict[str, Contender] = {name: contender(engine, workload, name) for name in schedules}
        with ExitStack() as stack:
            if self.twin is not None and TWIN in self.selected:
                contenders[TWIN] = contender(engine_for(self.twin, workload), workload, BASELINE)
            for kind in self.files:
                runs = partial(self._builds_of, kind, workload, stack)
                contenders |= runs(repacks=True) or runs(repacks=False)  # if all builds crash when they repack weights
            is_on_cpu = self.subject.model.device.type == "cpu"
            yield {name: watched(each) if is_on_cpu else each for name, each in contenders.items()}

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
