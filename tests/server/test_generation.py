from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from nvium_core import EngineError, EngineWorker, SamplingParams, TokenStream
from tests.server.live_server import LiveServer


@contextmanager
def refusing_the_second(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    submit, num_submitted = EngineWorker.submit, 0

    def fragile(self: EngineWorker, token_ids: list[int], params: SamplingParams) -> list[TokenStream]:
        nonlocal num_submitted
        num_submitted += 1
        if num_submitted == 2:
            raise EngineError("the engine has stopped")
        return submit(self, token_ids, params)

    with monkeypatch.context() as patched:
        patched.setattr(EngineWorker, "submit", fragile)
        yield


def test_a_request_that_cannot_be_submitted_whole_leaves_nothing_behind(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with refusing_the_second(monkeypatch):
        assert server.complete(prompt=["a", "b", "c"], max_tokens=3000).status_code == 500
    assert server.service.admission.num_present == 0
    assert server.complete(n=3, max_tokens=2).status_code == 200
