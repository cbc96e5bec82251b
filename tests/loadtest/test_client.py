import asyncio

import pytest

from loadtest.client import Arrival, LoadClient, RequestResult
from loadtest.workload import Workload
from tests.loadtest.fake_server import DONE, STORY, FakeServer, chunk, client_of, usage


async def results_of(server: FakeServer, workload: Workload) -> list[RequestResult]:
    async with client_of(server, model="tiny") as client:
        return await client.run(workload)


async def single_result(*events: str, status: str = "200 OK") -> RequestResult:
    [result] = await results_of(FakeServer(events=events, status=status), Workload(num_requests=1))
    return result


async def test_tokens_and_exits_of_a_stream_are_counted():
    result = await single_result(*STORY)
    assert result.error is None
    assert (result.num_prompt_tokens, result.num_tokens, result.exits) == (5, 3, [1, 3, 1])
    assert [arrival.num_tokens for arrival in result.arrivals] == [1, 2]


async def test_the_request_body_follows_the_workload():
    server, asked = FakeServer(events=STORY), {"max_tokens": 7, "temperature": 0.5, "seed": 3}
    await results_of(server, Workload(prompts=("hello",), num_requests=1, **asked))
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 7, "temperature": 0.5, "seed": 3}
    assert server.bodies == [body | {"stream": True, "stream_options": {"include_usage": True}}]


async def test_the_closed_loop_never_exceeds_its_concurrency():
    server = FakeServer(events=STORY, gap=0.002)
    assert len(await results_of(server, Workload(num_requests=9, concurrency=3))) == 9
    assert server.most_running == 3


async def test_open_loop_latencies_count_from_when_a_request_was_due():
    blocked = 0.2

    class LateClient(LoadClient):
        async def send(self, request, result):
            await asyncio.sleep(blocked)
            await super().send(request, result)

    async with client_of(FakeServer(events=STORY), LateClient) as client:
        [result] = await client.run(Workload(num_requests=1, rate=1000.0))
    assert result.latency > blocked
    assert result.time_to_first_token > blocked


@pytest.mark.parametrize(
    ("events", "status", "error", "message"),
    [
        (['{"error": {"message": "queue full"}}'], "503 Service Unavailable", "HTTP 503", "queue full"),
        (["no json"], "500 Internal Server Error", "HTTP 500", ""),
        ([chunk(" a", [1], [1]), 'data: {"error": {"message": "lost"}}', DONE], "200 OK", "error in stream", "lost"),
        ([chunk(" a", [1], [1])], "200 OK", "broken stream", "the stream ended without [DONE]"),
        (["<html>"], "200 OK", "broken stream", "the stream ended without [DONE]"),
        (["data: {"], "200 OK", "broken stream", "not a completion chunk: {"),
        (["data: 3"], "200 OK", "broken stream", "not a completion chunk: 3"),
        (['data: {"choices": [3]}'], "200 OK", "broken stream", 'not a completion chunk: {"choices": [3]}'),
        (['data: {"usage": [3]}'], "200 OK", "broken stream", 'not a completion chunk: {"usage": [3]}'),
        ([DONE], "200 OK", "empty answer", "the server sent no token"),
    ],
)
async def test_a_failure_is_recorded_as_the_error_of_its_request(events, status, error, message):
    result = await single_result(*events, status=status)
    assert (result.error, result.message) == (error, message)


async def test_tokens_of_other_servers_are_counted_by_chunks_or_usage():
    assert (await single_result(chunk("a").replace("data: ", "data:"), "data:[DONE]")).num_tokens == 1
    assert (await single_result(chunk("a"), chunk("b"), DONE)).num_tokens == 2
    assert (await single_result(chunk("a"), chunk("bc"), usage(1, 3), DONE)).num_tokens == 3


def test_a_gap_is_divided_among_the_tokens_of_its_chunk():
    result = RequestResult(due=1.0, finished=3.0, arrivals=[Arrival(1.5, 2), Arrival(1.7, 1), Arrival(2.3, 3)])
    assert result.time_to_first_token == pytest.approx(0.5)
    assert result.inter_token_latencies == pytest.approx([0.2, 0.2, 0.2, 0.2])
    assert result.latency == pytest.approx(2.0)
