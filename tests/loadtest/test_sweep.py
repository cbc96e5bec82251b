from hypothesis import given
from hypothesis import strategies as st

from loadtest.sweep import measure, workloads
from loadtest.workload import Workload
from tests.loadtest.fake_server import STORY, FakeServer, client_of


@given(num_levels=st.integers(1, 5), num_requests=st.integers(1, 9), warm_up=st.integers(0, 4))
def test_all_requests_of_a_sweep_have_different_seeds(num_levels, num_requests, warm_up):
    levels = [{"concurrency": number + 1} for number in range(num_levels)]
    sweep = workloads(Workload(num_requests=num_requests), levels, warm_up)
    starts = [load.first - warm_up for load in sweep]
    assert starts == [number * (num_requests + warm_up) for number in range(num_levels)]


async def test_every_load_is_measured_after_a_warm_up():
    server = FakeServer(events=STORY)
    sweep = workloads(Workload(num_requests=4), [{"concurrency": 1}, {"rate": 500.0}], 2)
    watched, done = [], []

    def watch(name, num_requests):
        watched.append((name, num_requests))
        return done.append

    async with client_of(server) as client:
        points = [await measure(client, load, 2, watch) for load in sweep]
    assert [(point.report.num_succeeded, point.report.num_tokens) for point in points] == [(4, 12), (4, 12)]
    assert sorted(body["seed"] for body in server.bodies) == list(range(12))
    names, numbers = zip(*watched, strict=True)
    assert names == ("concurrency 1, warm-up", "concurrency 1", "rate 500/s, warm-up", "rate 500/s")
    assert numbers == (2, 4, 2, 4)
    assert len(done) == 12
