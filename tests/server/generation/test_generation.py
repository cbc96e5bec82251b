from collections.abc import Sequence

import pytest

from nvium_core import EngineError, EngineRequest, EngineWorker, TokenStream
from server.generation.generation import Choice
from server.generation.service import Service
from server.telemetry.record import RequestRecord
from tests.server.live_server import LiveServer


def test_a_request_that_cannot_be_submitted_leaves_nothing_behind(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(self: EngineWorker, requests: Sequence[EngineRequest]) -> TokenStream:
        raise EngineError("the engine has stopped")

    with monkeypatch.context() as patched:
        patched.setattr(EngineWorker, "submit", stopped)
        assert server.complete(prompt=["a", "b", "c"], max_tokens=3000).status_code == 500
    assert server.service.admission.num_present == 0
    assert server.complete(n=3, max_tokens=2).status_code == 200


@pytest.mark.parametrize("of_server", [(RequestRecord, "admitted"), (Service, "deadline"), (Choice, "__init__")])
def test_what_was_submitted_is_cancelled_where_the_request_fails_afterwards(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, of_server: tuple[type, str]
) -> None:
    submit, streams = EngineWorker.submit, list[TokenStream]()

    def submitted(self: EngineWorker, requests: Sequence[EngineRequest], tenant: str = "") -> TokenStream:
        streams.append(submit(self, requests, tenant))
        return streams[-1]

    def failing(*args: object) -> None:
        raise RuntimeError("a defect")

    with monkeypatch.context() as patched:
        patched.setattr(EngineWorker, "submit", submitted)
        patched.setattr(*of_server, failing)
        assert server.complete(n=2, max_tokens=3000, ignore_eos=True).status_code == 500
    [stream] = streams
    assert stream.is_over
    assert server.service.admission.num_present == 0
