from pathlib import Path

import pytest

from loadtest import plots
from tests.loadtest.test_report import FAILED, good
from tests.loadtest.test_tables import point


def lines(panel) -> dict[str, list[float]]:
    return {line.get_label(): list(line.get_ydata()) for line in panel.get_lines()}


def test_a_sweep_is_drawn_in_order_of_its_loads():
    figure = plots.sweep([point(good(0.0), FAILED, rate=4.0), point(good(0.0), good(0.6), rate=2.0)])
    tokens, requests, failures, first, *_ = figure.axes
    assert [list(line.get_xdata()) for line in tokens.get_lines()] == [[2.0, 4.0]]
    assert lines(requests)["due"] == [2.0, 4.0]
    assert lines(requests)["answered"] == pytest.approx([2.0, 1 / 9])
    assert lines(requests)["within targets"] == pytest.approx([2.0, 1 / 9])
    assert list(failures.get_lines()[0].get_ydata()) == [0.0, 50.0]
    assert lines(first)["p99"] == pytest.approx([100.0, 100.0])


def test_a_load_at_which_nothing_succeeded_leaves_a_gap_in_the_latencies_only():
    figure = plots.sweep([point(good(0.0), concurrency=1), point(FAILED, concurrency=2)])
    assert len(lines(figure.axes[0])["_child0"]) == 2
    assert lines(figure.axes[3])["p50"] == pytest.approx([100.0])


@pytest.mark.parametrize("name", ["report.png", "report.svg", "report.pdf"])
@pytest.mark.parametrize("results", [(good(0.0), FAILED), (FAILED,)])
def test_one_load_is_drawn_as_shares_even_if_nothing_succeeded(tmp_path: Path, name: str, results):
    plots.save([point(*results)], tmp_path / name, "title")
    assert (tmp_path / name).stat().st_size > 1000
