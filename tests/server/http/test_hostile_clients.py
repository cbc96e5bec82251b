"""Attacks on a server in its own process while another client streams.

`python -m tests.server.http.test_hostile_clients FILE` attacks the bundled model, prints a table and writes it as JSON.
The bounds are wide because the machine may be busy. The failures that they catch took many times longer, or gigabytes.
"""

import asyncio
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import pytest

from nvium_core.bench.figures import write_json
from nvium_core.loading import bundled_model
from tests.faults.suite import table
from tests.server.http.attacks import ATTACKS, COMPLETIONS, Attack, Target, asking
from tests.server.http.test_keys import bearer
from tests.server.http.test_slow_clients import allow_open_files
from tests.server.live_server import wait_until
from tests.server.raw_client import JSON
from tests.server.server_process import ServerProcess, server_process

KEYS = {"attacker": "sk-attacker", "neighbour": "sk-neighbour"}
SAMPLING_SECONDS = 0.05
SILENCE_SECONDS = 30

SECONDS = 150
"""Timeout of an attack."""

MAX_MB = 1_000
"""Allowed growth of memory. Tokenizing 1.9 MB takes half of it; 40 bodies of lists once took twice as much."""


@dataclass
class Neighbour:
    """Streams one response after another in a thread. `waits` are the end and duration of each wait for a chunk."""

    target: Target
    waits: list[tuple[float, float]] = field(default_factory=list)
    num_failed: int = 0

    def run(self, is_over: threading.Event) -> None:
        fields = {"stream": True, "ignore_eos": True, "temperature": 1, "max_tokens": 900}
        headers = JSON | bearer(self.target.key)
        with httpx.Client(base_url=self.target.url, headers=headers, timeout=2 * SILENCE_SECONDS) as http:
            while not is_over.is_set():
                try:
                    self._stream(http, asking(prompt="Once upon a time", **fields), is_over)
                except httpx.TransportError:
                    self.num_failed += 1
                    time.sleep(SAMPLING_SECONDS)

    def _stream(self, http: httpx.Client, body: bytes, is_over: threading.Event) -> None:
        last = time.monotonic()
        with http.stream("POST", COMPLETIONS, content=body) as answer:
            self.num_failed += answer.status_code != 200
            for line in answer.iter_lines():
                if line.startswith('data: {"id"'):
                    now = time.monotonic()
                    self.waits.append((now, now - last))
                    last = now
                if is_over.is_set():
                    break


def anonymous_mb(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon:"))


async def sample_memory(pid: int, megabytes: list[float]) -> None:
    """Append samples of a process's memory until cancelled."""
    while True:
        megabytes.append(anonymous_mb(pid))
        await asyncio.sleep(SAMPLING_SECONDS)


@contextmanager
def attacked_server(model_folder: Path, folder: Path) -> Iterator[ServerProcess]:
    allow_open_files(4_000)
    keys = ",".join(f"{name}:{key}" for name, key in KEYS.items())
    with server_process(model_folder, folder, api_keys=keys, arrival_seconds=8, slow_client_seconds=8) as server:
        yield server


@pytest.fixture(scope="module")
def target(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with attacked_server(model_folder, tmp_path_factory.mktemp("hostile")) as server:
        yield server


async def tokens_beyond(neighbour: Neighbour, num_tokens: int) -> None:
    await asyncio.to_thread(wait_until, lambda: len(neighbour.waits) > num_tokens + 10, seconds=SECONDS)


@dataclass(frozen=True)
class Outcome:
    """What an attack got, and what it did to another client's stream and to the server's memory."""

    attack: str
    statuses: str
    is_fair: bool
    worst_gap_ms: float
    failed_beside: int
    grown_mb: float


async def outcome_of(attack: Attack, target: ServerProcess) -> Outcome:
    neighbour, is_over = Neighbour(Target(target.url, KEYS["neighbour"])), threading.Event()
    streaming = asyncio.create_task(asyncio.to_thread(neighbour.run, is_over))
    megabytes = [anonymous_mb(target.process.pid)]
    sampling = asyncio.create_task(sample_memory(target.process.pid, megabytes))
    try:
        await tokens_beyond(neighbour, 0)
        started = time.monotonic()
        async with asyncio.timeout(SECONDS):
            statuses = await attack.statuses(Target(target.url, KEYS["attacker"]))
        await tokens_beyond(neighbour, len(neighbour.waits))
    finally:
        sampling.cancel()
        is_over.set()
        await streaming
    worst = max(wait for end, wait in neighbour.waits if end > started)
    return Outcome(
        attack.name,
        ", ".join(f"{status or 'closed'} ({number})" for status, number in sorted(statuses.items())),
        set(statuses) <= attack.fair,
        round(worst * 1000, 1),
        neighbour.num_failed,
        round(max(megabytes) - megabytes[0], 1),
    )


@pytest.mark.slow
@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
async def test_an_attack_gets_fair_answers_and_another_stream_continues(target, attack):
    outcome = await outcome_of(attack, target)
    assert outcome.is_fair, outcome.statuses
    assert outcome.grown_mb < MAX_MB
    assert outcome.failed_beside == 0
    assert outcome.worst_gap_ms < SILENCE_SECONDS * 1000
    assert target.is_ready


def main() -> None:
    with TemporaryDirectory() as folder, attacked_server(bundled_model(), Path(folder)) as server:
        outcomes = [asyncio.run(outcome_of(attack, server)) for attack in ATTACKS]
    rows = [asdict(outcome) for outcome in outcomes]
    write_json({"rows": rows}, Path(sys.argv[1]))
    sys.stdout.write(table(outcomes))


if __name__ == "__main__":
    main()
