"""The server while the model loads. It answers 200 to `/livez`, and 503 to all other requests."""

from starlette.datastructures import MutableHeaders
from starlette.types import Scope

from server.admission import Admission, Drainable
from server.errors import Rejected
from server.http.middleware import Check
from server.settings import Settings
from server.telemetry.metrics import Metrics

RETRY_SECONDS = 2


class Loading(Drainable):
    """Stands in for an app's service until the model is loaded. Requests reach no route except `/livez`."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.metrics = Metrics(settings.latency_buckets)
        self.admission = Admission(0)


class UntilLoaded(Check):
    """Refuses requests, except liveness probes, while the app's service is `Loading`."""

    def check(self, scope: Scope, headers: MutableHeaders) -> None:
        if isinstance(scope["app"].state.service, Loading) and scope["path"] != "/livez":
            raise Rejected("not_ready", "the model is loading", retry_after_seconds=RETRY_SECONDS)
