from collections.abc import Sequence

import pytest

from nvium_core import EngineError, EngineRequest, EngineWorker, TokenStream
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
