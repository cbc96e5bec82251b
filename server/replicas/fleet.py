"""Starts the replicas one after another, probes them, replaces those that end, and chooses one for each request."""

import asyncio
import json
import os
import random
import secrets
import signal
import sys
import time
from collections.abc import AsyncIterator, Collection
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress

import aiohttp
import structlog
import torch

from nvium_core.text.sandbox import PROGRAM
from server.errors import Rejected
from server.http.server import STOP_SECONDS
from server.replicas.replica import READY, USER_ERROR
from server.settings import Settings, SettingsError, environment
from server.telemetry.metrics import Metrics

PROBE_SECONDS, MAX_FAILED_PROBES = 1, 3
"""Pause between probes. A replica that fails three in a row is killed."""

ANSWER_SECONDS = 2  # timeout for a replica's response to a probe or scrape

IDLE_SECONDS, KEEP_ALIVE_SECONDS = 15, 60
"""How long the gateway, and a replica, keep an idle connection between them."""

WAIT_SECONDS, POLL_SECONDS = 30, 0.1  # how long a request waits for a replica

STALL_SECONDS = 10
"""Maximum duration of a replica's Step, unless `--stall-seconds` is given."""

STABLE_SECONDS, MAX_PAUSE_SECONDS = 60, 30
"""If a replica ends earlier, it is started again after a pause, which doubles each time."""

log = structlog.get_logger("nvium.server")


class Replica:
    """A server process, its replacements, and the gateway's connections to it."""

    session: aiohttp.ClientSession

    def __init__(self, number: int, settings: Settings, *, is_on_gpu: bool) -> None:
        self.name = str(number)
        self.address = f"nvium-{secrets.token_hex(16)}"
        """The name of the process's abstract socket, which leaves no file behind."""
        self.is_ready = False
        self.was_ready = asyncio.Event()
        """Set once a process has been ready."""
        self.num_requests = 0
        self._options = settings.model_dump_json()
        self._environment = environment(gpu=number if is_on_gpu else None)

    def connect(self) -> None:
        self.session = aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(f"\0{self.address}", limit=0, keepalive_timeout=IDLE_SECONDS),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=WAIT_SECONDS),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    async def run(self) -> str:
        """Run a process until it ends, and return the reason. If cancelled, stop the process."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-c", PROGRAM.format("server.replicas.replica")),
            *(self.address, str(os.getpid()), self._options, json.dumps(sys.path)),
            env=self._environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl-C must not end the process while the gateway drains
        )
        assert process.stdout
        try:
            line = b""
            async for line in process.stdout:  # libraries may print too
                if line == READY:
                    await self._probe(process)
            code = await process.wait()
            is_refused = code == USER_ERROR and line != READY
            return line.decode().strip() if is_refused else f"replicas: a replica {ending(code)}"
        finally:
            self.is_ready = False
            if process.returncode is None:
                await self.session.close()  # the process waits for its connections to close
                await stop(process)

    async def get(self, path: str) -> str | None:
        """Get a page. Return None if the replica does not answer with 200 in time."""
        with suppress(aiohttp.ClientError, OSError):
            async with asyncio.timeout(ANSWER_SECONDS), self.session.get(f"http://replica{path}") as answer:
                return await answer.text() if answer.ok else None
        return None

    async def _probe(self, process: asyncio.subprocess.Process) -> None:
        """Update `is_ready` until the process ends. Kill it if it does not answer."""
        self.is_ready, num_failed = True, 0
        self.was_ready.set()
        while num_failed < MAX_FAILED_PROBES:
            with suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), PROBE_SECONDS)
                return
            readiness, liveness = await asyncio.gather(self.get("/readyz"), self.get("/livez"))
            self.is_ready = readiness is not None
            num_failed = 0 if liveness else num_failed + 1
        log.error("a replica does not answer", replica=self.name)
        process.kill()


class Fleet:
    """All replicas. `started` is done when all are ready, or raises the error of one that cannot start."""

    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        count = settings.replicas or 1
        num_gpus = 0 if settings.device == "cpu" else torch.cuda.device_count()
        is_on_gpu = settings.device == "cuda" or num_gpus > 0
        if is_on_gpu and num_gpus < count:
            raise SettingsError(f"replicas: {count} replicas need {count} GPUs, this machine has {num_gpus}")
        own = settings.model_copy(update=own_options(settings, count))
        self.replicas = [Replica(number, own, is_on_gpu=is_on_gpu) for number in range(count)]
        self.started = Future[None]()
        self._metrics = metrics

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        for replica in self.replicas:
            replica.connect()
        self._keeping = asyncio.create_task(self._keep_all())
        try:
            yield
        finally:
            self._keeping.cancel()
            await asyncio.wait([self._keeping])
            for replica in self.replicas:
                await replica.session.close()

    @property
    def has_failed(self) -> bool:
        """Whether a bug has ended the task that keeps the replicas running, after all had started."""
        has_ended = self._keeping.done() and not self._keeping.cancelled()
        return has_ended and self.started.done() and not self.started.exception()

    async def chosen(self, lost: Collection[Replica]) -> Replica:
        """Wait for replicas. Return the least busy one, preferably not in `lost`. Raise `Rejected` if none comes."""
        waits_until = time.monotonic() + WAIT_SECONDS
        while not (ready := [replica for replica in self.replicas if replica.is_ready]):
            if time.monotonic() > waits_until:
                raise no_replica()
            await asyncio.sleep(POLL_SECONDS)
        return min(random.sample(ready, len(ready)), key=lambda replica: (replica in lost, replica.num_requests))

    async def _keep_all(self) -> None:
        """Start one replica after another, so that each sees how much memory is left, and keep them running."""
        try:
            async with asyncio.TaskGroup() as group:
                for replica in self.replicas:
                    group.create_task(self._keep(replica))
                    await replica.was_ready.wait()
                self.started.set_result(None)
        except* Exception as errors:
            if self.started.done():
                raise
            self.started.set_exception(errors.exceptions[0])

    async def _keep(self, replica: Replica) -> None:
        pause = 0.0
        while True:
            started_at = time.monotonic()
            try:
                reason = await replica.run()
            except OSError as error:
                reason = f"replicas: a replica cannot be started: {error}"
            if not replica.was_ready.is_set():
                raise SettingsError(reason)
            is_stable = time.monotonic() - started_at > STABLE_SECONDS
            pause = 0.0 if is_stable else min(2 * pause + 0.5, MAX_PAUSE_SECONDS)
            log.error("a replica ended and is started again", replica=replica.name, reason=reason, pause_seconds=pause)
            self._metrics.replica_restarts.inc()
            await asyncio.sleep(pause)


def no_replica() -> Rejected:
    return Rejected("no_replica", "no replica is available", retry_after_seconds=5)


def own_options(settings: Settings, count: int) -> dict[str, object]:
    """Return the options that differ in replicas. The gateway checks keys, origins and rates, and says goodbye."""
    threads = str(max(1, torch.get_num_threads() // count)) if settings.threads == "auto" else settings.threads
    public: dict[str, object] = dict.fromkeys(("api_keys_file", "requests_per_minute", "ssl_certfile", "ssl_keyfile"))
    own = {"threads": threads, "http_keep_alive_seconds": KEEP_ALIVE_SECONDS, "goodbye_seconds": 0}
    own["stall_seconds"] = settings.stall_seconds or STALL_SECONDS
    return {**public, **own, "cors_origins": ()}


def ending(code: int) -> str:
    """Return how a process ended, from its exit code or, if negative, its signal."""
    if code >= 0:
        return f"ended with exit code {code}"
    hint = ", which the system also sends when memory runs out" if code == -signal.SIGKILL else ""
    return f"was ended by signal {-code} ({signal.strsignal(-code)}){hint}"


async def stop(process: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):
        process.terminate()
        try:
            await asyncio.wait_for(process.wait(), STOP_SECONDS)
        except TimeoutError:
            process.kill()
            await process.wait()
