"""Forecasts of load tests that were themselves simulated, and reports that are none."""

import json
from pathlib import Path
from typing import Any

import pytest

from nvium_core.engine.params import EngineConfig, InvalidRequest
from nvium_core.engine.schedule.costs import StepCosts
from nvium_core.planning.capacity import Demand, arrivals
from nvium_core.planning.forecast import MEASURES, error, fit, forecast, forecasts, read, table
from nvium_core.planning.machine import Machine
from nvium_core.planning.simulator import Request, serve

COSTS = StepCosts.linear([0.002] * 3, [0.0002] * 3)
ROUTING = (0.25, 0.25, 0.5)
CONFIG = EngineConfig(schedule="sweep", max_sequences=8)


def machine(costs: StepCosts = COSTS, **rest: float) -> Machine:
    return Machine(costs=costs, routing=ROUTING, config=CONFIG, **rest)  # type: ignore[arg-type]


def requests_at(rate: float, count: int = 200) -> list[Request]:
    """Answered by the machine."""
    asked = arrivals(Demand(rate=rate, prompt_tokens=(4, 30), output_tokens=(1, 12)), 1, count)
    serve(machine(), asked)
    return asked


def report(*rates: float, count: int = 200) -> dict[str, Any]:
    """As the load test writes it."""
    return {"points": [{"rate": rate, "requests": told(requests_at(rate, count))} for rate in rates]}


def told(requests: list[Request]) -> list[dict[str, Any]]:
    return [
        {
            "due": request.due,
            "time_to_first_token": request.first_token,
            "latency": request.total,
            "num_prompt_tokens": request.num_prompt_tokens,
            "num_tokens": request.num_tokens,
            "exits": [1, 2, 3, 3],
        }
        for request in requests
    ]


def written(folder: Path, content: Any) -> Path:
    file = folder / "report.json"
    file.write_text(json.dumps(content))
    return file


def test_the_machine_that_answered_is_foreseen(tmp_path: Path) -> None:
    loads, exits = read(written(tmp_path, report(5.0, 20.0)))
    assert exits == ROUTING
    assert [load.rate for load in loads] == [5.0, 20.0]
    for load in loads:
        assert load.foreseen(machine(), seed=0) == load.seen
        assert forecast(machine(), load).ratios == pytest.approx([1.0] * 10, rel=0.12)


def test_a_machine_that_is_thought_half_as_fast_is_foreseen_to_be_slower(tmp_path: Path) -> None:
    [load], _ = read(written(tmp_path, report(1.0)))
    found = forecast(machine(StepCosts.linear([0.004] * 3, [0.0004] * 3)), load)
    assert all(1.9 < found.ratio(measure, 50) < 2.6 for measure in MEASURES)
    assert found.planned_answers == pytest.approx(found.measured_answers, rel=0.02)


def test_what_http_takes_is_in_a_forecast(tmp_path: Path) -> None:
    [load], _ = read(written(tmp_path, report(0.5)))
    plain = forecast(machine(), load)
    slower = forecast(machine(http_request_seconds=0.05, http_token_seconds=0.01), load)
    assert slower.planned["first_token"][50] == pytest.approx(plain.planned["first_token"][50] + 0.06, rel=0.02)
    assert slower.planned["between_tokens"][50] == pytest.approx(plain.planned["between_tokens"][50] + 0.01, rel=0.02)


def test_what_http_takes_is_found_from_a_report(tmp_path: Path) -> None:
    served = machine(http_request_seconds=0.004, http_token_seconds=0.0002)
    asked = requests_at(4.0, count=400)
    serve(served, asked, seed=1)
    loads, _ = read(written(tmp_path, {"points": [{"rate": 4.0, "requests": told(asked)}]}))
    found = fit(machine(), loads)
    assert error(found, loads) < 0.05
    assert error(machine(), loads) > 0.1
    assert found.costs is COSTS


def test_beyond_saturation_the_answers_per_second_are_those_of_a_full_replica(tmp_path: Path) -> None:
    [load], _ = read(written(tmp_path, report(10_000.0)))
    found = forecast(machine(StepCosts.linear([0.004] * 3, [0.0004] * 3)), load)
    assert found.measured_answers < 1000
    assert found.is_saturated
    assert len(found.ratios) == 4
    assert found.planned_answers == pytest.approx(found.measured_answers / 2, rel=0.1)


def test_answers_of_one_token_have_nothing_between_tokens(tmp_path: Path) -> None:
    asked = arrivals(Demand(rate=5.0, prompt_tokens=(4, 30), output_tokens=(1, 1)), 1, 50)
    serve(machine(), asked)
    [load], _ = read(written(tmp_path, {"points": [{"rate": 5.0, "requests": told(asked)}]}))
    found = forecast(machine(), load)
    assert len(found.ratios) == 7
    assert found.as_dict()["planned_over_measured"].keys() == {"first_token", "total", "answered_per_second"}


def test_a_table_tells_both_and_how_many_were_met(tmp_path: Path) -> None:
    loads, _ = read(written(tmp_path, report(5.0, 20.0)))
    shown = table(machine(), forecasts(machine(), loads))
    assert shown.row_count == 2 * (1 + len(MEASURES))
    assert "20 of 20 within 15%" in str(shown.caption)


def without_first_tokens() -> dict[str, Any]:
    broken = report(5.0)
    broken["points"][0]["requests"][7]["time_to_first_token"] = None
    return broken


def of_a_closed_loop() -> dict[str, Any]:
    broken = report(5.0)
    broken["points"][0]["rate"] = None
    return broken


def of_another_server() -> dict[str, Any]:
    broken = report(5.0)
    for request in broken["points"][0]["requests"]:
        request["exits"] = []
    return broken


@pytest.mark.parametrize(
    "content",
    [
        [],
        {},
        "text",
        {"points": []},
        {"points": [{"rate": 5.0, "requests": []}]},
        without_first_tokens(),
        of_a_closed_loop(),
        of_another_server(),
        report(5.0, count=19),
    ],
    ids=["list", "empty", "text", "no points", "no requests", "failed", "closed loop", "no exits", "few"],
)
def test_what_is_no_such_report_is_refused_by_name(content: Any, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"report\.json"):
        read(written(tmp_path, content))


def test_a_file_that_is_no_json_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text("{")
    with pytest.raises(InvalidRequest, match=r"report\.json"):
        read(tmp_path / "report.json")
