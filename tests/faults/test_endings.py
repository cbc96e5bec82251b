import asyncio

import pytest
import torch

from nvium_core.engine.device.native.backend import NativeBackend
from nvium_core.engine.schedule.step import Step, StepResult
from tests.server.forked_server import forked_server
from tests.server.raw_client import asked, asking, connected, request


def lose_the_device() -> None:
    """Fail the Step of the prompt `BREAKS` and every later Step, as a lost device does."""
    run, lost = NativeBackend.run, list[Step]()

    def failing(backend: NativeBackend, step: Step, max_rows: int) -> StepResult:
        if lost or any(each.sequence.token_ids[0] == BREAKS[0] for each in step.runs):
            lost.append(step)
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
        return run(backend, step, max_rows)

    NativeBackend.run = failing


BREAKS = [200, 1, 2]


@pytest.mark.slow
async def test_a_dead_device_ends_the_process_after_all_requests_got_an_error(model_folder, tmp_path):
    with forked_server(model_folder, tmp_path / "log", prepare=lose_the_device) as server:
        async with connected(server.url) as stream, connected(server.url) as whole, connected(server.url) as probe:
            await stream.send(asking(max_tokens=3_000, stream=True))
            await whole.send(asking(max_tokens=3_000))
            await stream.head()
            broken = await asked(server.url, asking(prompt=BREAKS))
            await probe.send(request("/livez", method="GET"))
            assert (await probe.answer()).status == 503
            events, refused = await stream.rest(), await whole.answer()
        assert (broken.status, refused.status) == (500, 500)
        assert b'"error"' in events
        assert events.endswith(b"data: [DONE]\n\n")
        assert await asyncio.to_thread(server.exit_code, 20) == 1
        assert "the device thread has failed" in server.log()
