import io

from rich.console import Console

from loadtest.client import RequestResult
from loadtest.report import Report, Targets
from loadtest.sweep import Point
from loadtest.tables import tables
from loadtest.workload import Workload
from tests.loadtest.test_report import FAILED, good


def point(*results: RequestResult, **workload: float) -> Point:
    report = Report.of(results, Targets(time_to_first_token=0.5))
    return Point(workload=Workload(**workload), results=results, report=report)


def shown(*points: Point) -> str:
    screen = io.StringIO()
    Console(file=screen, width=80).print(*tables(points))
    return screen.getvalue()


def test_tables_show_latencies_goodput_exits_and_errors_and_a_row_per_load():
    text = shown(point(good(0.0), FAILED))
    for part in ("time to first token", "100.0", "66.7%", "within targets", "error in stream", "lost"):
        assert part in text
    text = shown(point(good(0.0), rate=2.5), point(good(0.0), FAILED, rate=5.0))
    assert text.count("rate 2.5/s") == 2
    assert "100.0 / 100.0" in text
    assert "goodput/s" in text
    assert "error in stream, at rate 5/s" in text
