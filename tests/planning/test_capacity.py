"""Capacity against what queueing theory says, and against itself."""

import math
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvium_core.choices import Schedule
from nvium_core.engine.params import EngineConfig, InvalidRequest
from nvium_core.engine.schedule.costs import StepCosts
from nvium_core.planning.capacity import (
    Demand,
    Target,
    arrivals,
    look_ahead,
    outlook,
    saturation,
    span,
)
from nvium_core.planning.machine import Machine
from nvium_core.planning.simulator import Request, serve

ONE_BLOCK = StepCosts.linear([0.010], [0.001])
FOUR_BLOCKS = StepCosts.linear([0.002] * 4, [0.0002] * 4)
ROUTING = (0.15, 0.25, 0.35, 0.25)


def machine(costs: StepCosts = ONE_BLOCK, schedule: Schedule = "sweep", **rest: object) -> Machine:
    routing = (1.0,) if costs.num_blocks == 1 else ROUTING
    config = EngineConfig(schedule=schedule, max_sequences=int(rest.pop("max_sequences", 8)))  # type: ignore[call-overload]
    return Machine(costs=costs, routing=routing, config=config, **rest)  # type: ignore[arg-type]


def demand(rate: float, prompt_tokens: int = 4, output_tokens: int = 3) -> Demand:
    return Demand(rate=rate, prompt_tokens=(prompt_tokens,) * 2, output_tokens=(output_tokens,) * 2)


def test_a_request_that_is_alone_takes_what_its_steps_cost() -> None:
    request = Request(5.0, 4, 3)
    serve(machine(), [request])
    assert request.first_token == pytest.approx(0.014)
    assert request.between_tokens == pytest.approx(0.011)
    assert request.total == pytest.approx(0.014 + 2 * 0.011)


def test_http_slows_tokens_down_and_delays_the_first() -> None:
    request = Request(0.0, 4, 3)
    serve(machine(http_share=0.5, http_request_seconds=0.003, http_token_seconds=0.001), [request])
    assert request.first_token == pytest.approx(2 * 0.014 + 0.003 + 0.001)
    assert request.between_tokens == pytest.approx(2 * 0.011 + 0.001)


def test_two_that_are_there_together_share_their_steps() -> None:
    requests = [Request(0.0, 4, 3), Request(0.0, 2, 3)]
    serve(machine(), requests)
    assert requests[0].first_token == requests[1].first_token == pytest.approx(0.016)
    assert requests[0].total == pytest.approx(0.016 + 2 * 0.012)


def test_the_engine_s_own_time_is_paid_once_for_a_lone_token() -> None:
    costs = FOUR_BLOCKS.with_own((0.1, 0.0))
    request = Request(0.0, 1, 40)
    serve(machine(costs), [request])
    assert 0.1 < request.between_tokens < 0.1 + 4 * 0.0022 + 0.002


@pytest.mark.parametrize("busy", [0.3, 0.7])
def test_waits_are_those_of_a_queue_with_equal_service_times(busy: float) -> None:
    one_at_a_time, service = machine(max_sequences=1), 0.014
    requests = arrivals(demand(busy / service, output_tokens=1), 1, 20_000)
    serve(one_at_a_time, requests)
    wait = fmean(request.first_token for request in requests) - service
    assert wait == pytest.approx(busy * service / (2 * (1 - busy)), rel=0.08)  # Pollaczek and Khinchine


def test_a_replica_is_saturated_where_it_has_no_time_left() -> None:
    assert saturation(machine(max_sequences=1), demand(1.0, output_tokens=1), 100) == pytest.approx(1 / 0.014)


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 60), st.sampled_from(["sweep", "synchronous"]), st.integers(1, 12), st.integers(1, 40))
def test_every_request_is_served_in_full(count: int, schedule: Schedule, num_tokens: int, prompt: int) -> None:
    requests = arrivals(demand(100.0, prompt, num_tokens), 1, count)
    serve(machine(FOUR_BLOCKS, schedule, max_sequences=3), requests)
    for request in requests:
        assert request.due < request.first <= request.last
        assert (request.num_tokens == 1) == (request.between_tokens == 0)


def test_the_least_number_of_replicas_that_keeps_the_target_is_found() -> None:
    asked, target = demand(200.0), Target(first_token=0.05, percentile=95)
    seen = look_ahead(machine(), asked, target, 300)
    assert [look.meets_target for look in seen] == [False] * (len(seen) - 1) + [True]
    assert len(seen) > 1
    assert seen[-1].first_token[95] <= 0.05 < seen[-2].first_token[95]
    assert seen[-1].requests_per_second == pytest.approx(200 / seen[-1].replicas)


def test_of_many_replicas_too_the_least_number_is_found() -> None:
    asked, target = demand(2000.0), Target(first_token=0.05, percentile=95)
    seen = look_ahead(machine(), asked, target, 300)
    most = saturation(machine(), asked, 300)
    one_less = outlook(machine(), asked, target, seen[-1].replicas - 1, most, 300)
    assert seen[-1].meets_target
    assert seen[-1].replicas > 16
    assert not one_less.meets_target


def test_a_rate_beyond_saturation_never_keeps_any_target() -> None:
    most = saturation(machine(), demand(1.0), 200)
    look = outlook(machine(), demand(1.2 * most), Target(), 1, most, 200)
    assert look.utilization == pytest.approx(1.2)
    assert not look.meets_target


def test_a_target_that_no_idle_replica_keeps_is_said_to_be_out_of_reach() -> None:
    (alone,) = look_ahead(machine(), demand(5.0), Target(first_token=0.001), 100)
    assert not alone.meets_target
    assert alone.utilization <= 0.0101


@pytest.mark.parametrize("text", ["", "a", "1:2:3", "1:b", "1.5"])
def test_what_is_no_range_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="prompt-tokens"):
        span(text, "prompt-tokens")


def test_ranges_are_one_number_or_two() -> None:
    assert (span("7", "x"), span("7:9", "x")) == ((7, 7), (7, 9))


@pytest.mark.parametrize(
    ("wrong", "option"),
    [
        (lambda: demand(0.0), "rate"),
        (lambda: demand(math.nan), "rate"),
        (lambda: demand(1.0, prompt_tokens=0), "prompt-tokens"),
        (lambda: Demand(rate=1.0, prompt_tokens=(1, 1), output_tokens=(5, 4)), "output-tokens"),
        (lambda: Target(percentile=100), "percentile"),
        (lambda: Target(first_token=0), "target"),
        (lambda: machine(http_share=0), "http-share"),
        (lambda: machine(http_request_seconds=-1.0), "http-request-ms"),
        (lambda: machine(http_token_seconds=-1.0), "http-token-ms"),
        (lambda: Machine(costs=ONE_BLOCK, routing=(0.5, 0.5)), "costs"),
        (lambda: Machine(costs=FOUR_BLOCKS, routing=(0.5, 0.5, 0.5, 0.5)), "routing"),
    ],
)
def test_what_cannot_be_is_refused_by_name(wrong: object, option: str) -> None:
    with pytest.raises(InvalidRequest, match=option):
        wrong()  # type: ignore[operator]
