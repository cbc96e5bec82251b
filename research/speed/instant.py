"""Serve a model whose device answers at once, which leaves only the cost of the service.

    python -m research.speed.instant --port 8001
    python -m research.speed.overhead instant,http://127.0.0.1:8001,PID --streams 8 32 256 --tokens 1000

Each Step emits one token per sequence, taken in turn from a text. The process runs on one core (Linux).
"""

import argparse
import os
from collections.abc import Mapping, Sequence
from itertools import cycle

from nvium_core import LoadedModel, load_model
from nvium_core.bench.harness import PROMPT
from nvium_core.engine.config import EngineConfig
from nvium_core.engine.events import StepReport
from nvium_core.engine.schedule.step import Backend, Emission, Outcome, Step, StepResult
from server.app import assemble, serve
from server.generation.service import Service
from server.http.server import listen
from server.settings import Settings

MAX_STREAMS = 256


class InstantBackend:
    """A `Backend` without a device."""

    instructions = None
    num_multi_steps = 0
    async_scheduling = False
    eager_passes: Mapping[str, int] = {}

    def __init__(self, loaded: LoadedModel) -> None:
        self._num_blocks = loaded.model.config.num_exits
        blocks = range(self._num_blocks)
        self._tokens = cycle([Emission(token, i % len(blocks), -0.5) for i, token in enumerate(token_ids(loaded))])
        self._reports = [StepReport(block + 1, 1, 1, 1e-6) for block in blocks]

    def prepare(self, config: EngineConfig) -> None:
        """Nothing to prepare."""

    def run(self, step: Step, max_rows: int) -> StepResult:
        return StepResult([self._outcome(run.stop, run.reaches_front) for run in step.runs], self._reports)

    def _outcome(self, stop: int, emits: bool) -> Outcome:
        return Outcome([stop] * self._num_blocks, emissions=[next(self._tokens)] if emits else [])


def token_ids(loaded: LoadedModel) -> list[int]:
    ids: list[int] = loaded.tokenizer(PROMPT * 7, add_special_tokens=False).input_ids
    return ids


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m research.speed.instant", description=__doc__)
    parser.add_argument("--model", help="folder, Hub name or GGUF file [the bundled model]")
    parser.add_argument("--port", type=int, default=8001, help="port on 127.0.0.1 [8001]")
    parser.add_argument("--core", type=int, default=0, help="core of the process [0]")
    args = parser.parse_args(argv)
    os.sched_setaffinity(0, {args.core})
    loaded = load_model(args.model)
    settings = Settings(schedule="whole", max_sequences=MAX_STREAMS)
    service = Service(loaded, settings)
    engine = service.engine
    backend: Backend = InstantBackend(loaded)
    engine.runner.backend, engine.scheduler.num_multi_steps = backend, 0
    service.start()
    with listen("127.0.0.1", args.port) as listener:
        print(f"instant,http://127.0.0.1:{args.port},{os.getpid()}", flush=True)
        serve(assemble(service), listener)


if __name__ == "__main__":
    main()
