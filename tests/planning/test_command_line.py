"""`nvium plan`, run in this process."""

import json
from pathlib import Path

import pytest

from nvium_core.engine.schedule.costs import StepCosts
from tests.planning.test_forecast import report as a_report
from tests.test_cli import run


def plan(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *arguments: object) -> dict[str, dict[str, float]]:
    """The written figures of one number of sequences, by policy."""
    figures = tmp_path / "figures.json"
    assert run(monkeypatch, "plan", *arguments, "--json", figures) == 0
    return {row["policy"]: row for row in json.loads(figures.read_text())["rows"]}


def test_every_schedule_is_shown_beside_synchronous(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    rows = plan(monkeypatch, tmp_path, "--sequences", 2)
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("synchronous", "sweep", "threshold", "optimal", "tokens/s"))
    assert rows["synchronous"]["over_synchronous"] == 1
    assert rows["optimal"]["over_synchronous"] == pytest.approx(1.26, rel=0.01)


def test_milliseconds_become_tokens_per_second(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    costs = ("--routing", ".5,.5", "--fixed", "2,3", "--per-row", ".5", "--head", "1")
    rows = plan(monkeypatch, tmp_path, "--sequences", 1, *costs)
    assert rows["synchronous"]["tokens_per_second"] == pytest.approx(1000 / (2.5 + 3.5 + 1), rel=0.01)


def test_saved_costs_are_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    saved = tmp_path / "costs.json"
    saved.write_text(json.dumps(StepCosts.linear([0.004, 0.001], [0, 0]).as_dict()))
    rows = plan(monkeypatch, tmp_path, "--sequences", 1, "--routing", ".5,.5", "--costs", saved)
    assert rows["synchronous"]["tokens_per_second"] == pytest.approx(200, rel=0.01)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--routing", ".5,.4"], "routing"),
        (["--routing", "a,b"], "routing"),
        (["--fixed", "1,2"], "fixed"),
        (["--fixed=-1"], "fixed"),
        (["--fixed", "0"], "fixed"),
        (["--per-row=-1"], "per-row"),
        (["--per-row", "nan"], "per-row"),
        (["--head=-1"], "head"),
        (["--sequences", "0"], "sequences"),
        (["--sequences", "1.5"], "sequences"),
        (["--costs", "no-such-file"], "no-such-file"),
        (["--costs", "TEXT"], "costs"),
        (["--costs", "TWO", "--fixed", "1"], "costs"),
        (["--costs", "TWO"], "costs"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_option(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    arguments: list[str],
    complaint: str,
) -> None:
    files = {"TEXT": tmp_path / "text", "TWO": tmp_path / "two.json"}
    files["TEXT"].write_text("{")
    files["TWO"].write_text(json.dumps(StepCosts.linear([1, 1], [0, 0]).as_dict()))
    code = run(monkeypatch, "plan", *(str(files.get(a, a)) for a in arguments))
    captured = capsys.readouterr()
    assert code == 2
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert complaint in captured.err


def test_replicas_for_a_rate_are_shown_and_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    figures = tmp_path / "figures.json"
    asked = ("--rate", "40", "--prompt-tokens", "8:16", "--output-tokens", "4", "--target-ttft-ms", "60")
    assert run(monkeypatch, "plan", *asked, "--json", figures) == 0
    found = json.loads(figures.read_text())
    assert found["replicas"] == found["rows"][-1]["replicas"] >= 1
    assert found["rows"][-1]["first_token"]["95"] <= 0.06
    assert (found["rate"], found["prompt_tokens"], found["between_tokens"]) == (40, [8, 16], None)
    assert f"need {found['replicas']}" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [(["--rate", "0"], "rate"), (["--rate", "1", "--prompt-tokens", "x"], "prompt-tokens")],
)
def test_a_demand_that_cannot_be_is_one_line_and_exit_code_2(
    arguments: list[str], complaint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "plan", *arguments) == 2
    assert complaint in capsys.readouterr().err


def test_a_load_test_is_held_against_what_was_foreseen(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    report, figures, plot = (tmp_path / name for name in ("report.json", "figures.json", "plot.png"))
    report.write_text(json.dumps(a_report(5.0, 20.0)))
    machine = ("--fixed", "2", "--per-row", "0.2", "--max-sequences", "8")
    assert run(monkeypatch, "plan", "--against", report, "--fit", *machine, "--json", figures, "--plot", plot) == 0
    assert "of 20 within 15%" in " ".join(capsys.readouterr().out.split())
    found = json.loads(figures.read_text())
    assert [load["rate"] for load in found["loads"]] == [5.0, 20.0]
    assert found["loads"][0]["planned_over_measured"]["total"]["50"] > 0
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--against", "REPORT", "--rate", "1"], "against"),
        (["--against", "REPORT", "--plot", "a.gif"], "plot"),
        (["--rate", "1", "--plot", "a.png"], "plot"),
        (["--rate", "1", "--fit"], "fit"),
        (["--rate", "1", "--head", "2"], "head"),
        (["--against", "nowhere.json"], "nowhere.json"),
    ],
)
def test_a_report_that_cannot_be_held_against_anything_is_one_line(
    arguments: list[str],
    complaint: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    (tmp_path / "report.json").write_text(json.dumps(a_report(5.0)))
    files = {"REPORT": str(tmp_path / "report.json")}
    assert run(monkeypatch, "plan", *(files.get(a, a) for a in arguments)) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert complaint in captured.err
