"""Admission control: limits running and waiting choices, and refuses all while draining."""

from collections.abc import Iterator
from contextlib import contextmanager

from server.errors import RETRY_STOPPED_SECONDS, InvalidField, Rejected
from server.settings import Settings
from server.telemetry.metrics import Metrics


class Admission:
    """Counts the running and waiting choices. Use it on the event loop only."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.num_present = 0
        self.is_leaving = False
        """While True, the readiness probe fails."""
        self.is_draining = False
        """While True, all requests are refused."""

    def enter(self, num_choices: int) -> None:
        """Admit all choices of a request. Raise `InvalidField` or `Rejected` if they do not fit."""
        if num_choices > self.capacity:
            raise InvalidField(
                "n", f"the request has {num_choices} choices (prompts × n), the server accepts at most {self.capacity}"
            )
        self.check_open()
        if self.num_present + num_choices > self.capacity:
            message = f"the queue is full: {self.num_present} of {self.capacity} choices are running or waiting"
            raise Rejected("queue_full", message, retry_after_seconds=1)
        self.num_present += num_choices

    def check_open(self) -> None:
        """Raise `Rejected` while the server drains."""
        if self.is_draining:
            raise Rejected("draining", "the server is shutting down", retry_after_seconds=RETRY_STOPPED_SECONDS)

    @contextmanager
    def entered(self, num_choices: int) -> Iterator[None]:
        """Admit choices. If the `with` block raises, release them. If not, `leave` must be called for each choice."""
        self.enter(num_choices)
        try:
            yield
        except BaseException:
            self.leave(num_choices)
            raise

    def leave(self, num_choices: int = 1) -> None:
        self.num_present -= num_choices
        assert self.num_present >= 0


class Drainable:
    """What an app serves and drains at shutdown: a server's service, or the gateway in front of replicas."""

    settings: Settings
    admission: Admission
    metrics: Metrics

    @property
    def has_failed(self) -> bool:
        return False

    def check_live(self) -> None:
        """Raise `ApiError` if nothing makes progress."""

    async def check_ready(self) -> None:
        """Raise `ApiError` if requests are not accepted."""

    async def metrics_page(self) -> bytes:
        return self.metrics.page()

    def tick(self) -> None:
        """Do what is due. The event loop calls this ten times a second."""

    def give_up(self) -> None:
        """Fail all open requests."""


class Loading(Drainable):
    """Stands in for an app's service until the model is loaded. Requests reach no route except `/livez`."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.metrics = Metrics(settings.latency_buckets)
        self.admission = Admission(0)
