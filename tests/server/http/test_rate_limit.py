import re
from collections import Counter

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.http.access import RateLimit
from tests.byte_model import NAME
from tests.server.http.test_keys import Reached, bearer, called
from tests.server.live_server import live_server
from tests.server.raw_client import error_of

PER_MINUTE = 4
EXEMPT = ("/v1/models", "/livez", "/readyz", "/health", "/", "/assets/page.js", "/metrics")


@given(st.lists(st.tuples(st.sampled_from(["", "alice", "bob"]), st.sampled_from(["/version", "/nope", *EXEMPT]))))
async def test_the_limit_applies_to_each_key(requests):
    reached = Reached()
    layer = RateLimit(reached, PER_MINUTE)
    counted: Counter[str] = Counter()
    for key_id, path in requests:
        [start, *_] = await called(layer, "GET", path, key_id=key_id)
        counted[key_id] += path not in EXEMPT
        is_refused = path not in EXEMPT and counted[key_id] > PER_MINUTE
        assert start["status"] == (429 if is_refused else 200)
    refused = sum(max(0, count - PER_MINUTE) for count in counted.values())
    assert len(reached.states) == len(requests) - refused


@given(st.lists(st.tuples(st.sampled_from(["alice", "bob"]), st.sampled_from([0.0, 0.5, 14.5, 29.75, 60.0]))))
async def test_the_limit_applies_to_any_60_seconds(requests):
    now = 0.0
    layer = RateLimit(Reached(), PER_MINUTE, clock=lambda: now)
    accepted: list[tuple[str, float]] = []
    for key_id, seconds in requests:
        now += seconds
        [start, *_] = await called(layer, "GET", "/version", key_id=key_id)
        within = [at for other, at in accepted if other == key_id and at > now - 60]
        assert start["status"] == (200 if len(within) < PER_MINUTE else 429)
        if start["status"] == 200:
            accepted.append((key_id, now))


async def test_only_the_times_within_the_limit_are_stored():
    layer = RateLimit(Reached(), PER_MINUTE)
    for _ in range(50):
        for key_id in ("alice", "bob"):
            await called(layer, "POST", "/v1/completions", key_id=key_id)
    assert [len(times) for times in layer.times.values()] == [PER_MINUTE] * 2


def test_responses_show_the_remaining_requests_and_refusals_when_to_retry(byte_model):
    with live_server(byte_model, api_keys="alice:sk-a,bob:sk-b", requests_per_minute=2) as server:
        alice = bearer("sk-a") | {"x-request-id": "mine"}
        assert server.http.get("/v1/models", headers=alice).status_code == 200
        answers = [server.http.get("/version", headers=alice) for _ in range(3)]
        assert [answer.status_code for answer in answers] == [200, 200, 429]
        assert [answer.headers["x-ratelimit-limit-requests"] for answer in answers] == ["2"] * 3
        assert [answer.headers["x-ratelimit-remaining-requests"] for answer in answers] == ["1", "0", "0"]
        for answer in answers:
            reset = re.fullmatch(r"(\d+\.\d{3})s", answer.headers["x-ratelimit-reset-requests"])
            assert reset
            assert 0 < float(reset[1]) <= 60
        error = error_of(answers[2])
        assert answers[2].headers["x-request-id"] == "mine"
        assert (error["type"], error["code"]) == ("requests", "rate_limit_exceeded")
        assert 0 < int(answers[2].headers["retry-after"]) <= 60
        assert f"retry in {answers[2].headers['retry-after']} s" in error["message"]

        assert server.http.get("/version", headers=bearer("sk-b")).status_code == 200
        assert server.http.get("/version").status_code == 401
        assert server.http.get("/livez", headers=bearer("sk-a")).status_code == 200
        page = server.http.get("/metrics", headers=bearer("sk-a")).text
        assert 'nvium_rejected_total{reason="rate_limit_exceeded"} 1.0' in page


def test_without_keys_all_clients_share_the_limit(byte_model, server):
    assert not any(name.startswith("x-ratelimit") for name in server.http.get("/version").headers)
    with live_server(byte_model, requests_per_minute=1) as limited:
        completions = limited.client().completions
        assert completions.create(model=NAME, prompt="Once", max_tokens=1).choices
        with pytest.raises(openai.RateLimitError) as refused:
            completions.create(model=NAME, prompt="Once", max_tokens=1)
        assert refused.value.code == "rate_limit_exceeded"
        assert limited.gauge('nvium_requests_total{endpoint="completions",outcome="rejected"}') == 1
