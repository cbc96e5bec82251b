import io

from rich.console import Console

from loadtest.client import RequestResult
from loadtest.report import Report
from loadtest.sweep import Point, table
from loadtest.workload import Workload
from tests.loadtest.test_report import FAILED, good


def point(*results: RequestResult, **workload: float) -> Point:
    return Point(workload=Workload(**workload), report=Report.of(results))


def shown(*points: Point) -> str:
    screen = io.StringIO()
    Console(file=screen, width=80).print(table(points))
    return screen.getvalue()


def test_the_table_shows_a_column_per_load_and_the_errors():
    text = shown(point(good(0.0), FAILED, rate=5.0), point(good(0.0), rate=2.5))
    for part in ("rate 2.5/s", "first token, ms: p50", "100.0", "66.7%", "error in stream", "1: lost"):
        assert part in text
