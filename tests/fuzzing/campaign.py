"""Fuzzes one target in separate processes. Restarts after a crash, a timeout or a lack of memory."""

import re
import resource
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

TARGETS = ("connection", "schemas", "checkpoint", "gguf_file")
CORPUS = Path(__file__).parent / "corpus"

TIMEOUT_SECONDS = 600
"""Timeout per input. It is long because the machine may be busy."""

MEMORY_MB = 4096
INPUT_BYTES = 16_384
START_SECONDS = 20
"""Do not restart with less time left."""

MAX_KEPT_BYTES = 4_096
PROGRESS = re.compile(r"^#(\d+)\s+\w+\s+cov: (\d+)", re.MULTILINE)


@dataclass(frozen=True)
class Hunt:
    """`covered_at_first` and `covered` are the covered edges after the first inputs and at the end."""

    target: str
    processor_minutes: float
    inputs: int
    covered_at_first: int
    covered: int
    findings: int


class Campaign:
    """Hunts of one target. The folder contains `corpus`, `findings` and the fuzzer's `log`."""

    def __init__(self, name: str, folder: Path) -> None:
        self._name = name
        self._corpus, self.findings, self._log = folder / "corpus", folder / "findings", folder / "log"
        for made in (self._corpus, self.findings, CORPUS / name):
            made.mkdir(parents=True, exist_ok=True)

    def hunt(self, seconds: float) -> Hunt:
        started, used = time.monotonic(), processor_seconds()
        num_inputs, covered = 0, list[int]()
        for number, seed in enumerate(import_module(f"tests.fuzzing.targets.{self._name}").seeds()):
            (self._corpus / f"seed-{number}").write_bytes(seed)
        while (left := seconds - (time.monotonic() - started)) > (START_SECONDS if covered else 0):
            log = self._run(left, f"-artifact_prefix={self.findings}/", str(self._corpus), str(CORPUS / self._name))
            progress = PROGRESS.findall(log)
            num_inputs += int(progress[-1][0]) if progress else 0
            covered += [int(edges) for _, edges in progress] or [0]
        minutes = round((processor_seconds() - used) / 60, 1)
        num_findings = sum(path.suffix != ".txt" for path in self.findings.iterdir())
        return Hunt(self._name, minutes, num_inputs, covered[0], max(covered), num_findings)

    def keep(self) -> None:
        """Add small inputs with new coverage to the repository's corpus."""
        self._run(0, "-merge=1", f"-max_len={MAX_KEPT_BYTES}", str(CORPUS / self._name), str(self._corpus))

    def _run(self, seconds: float, *options: str) -> str:
        limits = [f"-timeout={TIMEOUT_SECONDS}", f"-report_slow_units={TIMEOUT_SECONDS}"]
        limits += [f"-rss_limit_mb={MEMORY_MB}", f"-max_len={INPUT_BYTES}"]
        command = [sys.executable, "-m", "tests.fuzzing.hunt", self._name, "--findings", str(self.findings), *limits]
        duration = [f"-max_total_time={max(1, int(seconds))}"] if seconds else []
        with self._log.open("w+") as log:
            subprocess.run([*command, *duration, *options], stderr=log, stdout=log, check=False)
            log.seek(0)
            return log.read()


def processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
