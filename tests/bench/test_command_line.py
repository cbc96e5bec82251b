"""`nvium bench`, run in this process."""

import json
from pathlib import Path

import pytest

from tests.byte_model import save_byte_model
from tests.test_cli import run


@pytest.fixture(scope="module")
def byte_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_byte_model(tmp_path_factory.mktemp("models") / "bytes", context=256)


def test_the_default_experiment_is_peers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, byte_model: Path
) -> None:
    figures = tmp_path / "figures.json"
    small = ("--model", byte_model, "--dtype", "float64", "--tokens", 3, "--seconds", 1, "--against", "generate")
    assert run(monkeypatch, "bench", "--json", figures, *small) == 0
    printed = capsys.readouterr().out
    assert "Early exits make 1 stream" in printed
    written = json.loads(figures.read_text())
    assert (written["experiment"], written["model"], written["dtype"]) == ("peers", "bytes", "float64")
    assert [row["sequences"] for row in written["rows"]] == [1, 8]
    machine = written["machine"]
    assert machine["threads"] == written["threads"] >= 1
    assert machine["instructions"] == written["instructions"]
    assert min(machine["bytes_per_second"], machine["flops_per_second"]["float64"]) > 0
    assert all(row["ours_over"]["generate"] > 0 for row in written["rows"])


def test_profile_measures_a_shape_with_forced_routing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    figures = tmp_path / "figures.json"
    shape = ("--shape", "2x128", "--routing", "1,0", "--dtype", "float32")
    assert run(monkeypatch, "bench", "profile", *shape, "--tokens", 4, "--json", figures) == 0
    assert "host overhead" in capsys.readouterr().out
    assert json.loads(figures.read_text())["rows"][0]["parts_us"]["layers"] > 0


def test_schedules_end_with_a_conclusion(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], byte_model: Path
) -> None:
    small = ("--model", byte_model, "--tokens", 4, "--repeats", 1, "--sequences", "1,2")
    assert run(monkeypatch, "bench", "schedules", *small) == 0
    assert "Early exits make 1 stream" in " ".join(capsys.readouterr().out.split())


def test_sampling_modes_are_compared(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], byte_model: Path
) -> None:
    small = ("--model", byte_model, "--tokens", 3, "--repeats", 1, "--sequences", "1")
    assert run(monkeypatch, "bench", "sampling", *small) == 0
    assert "temperature 0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["chaos"], "chaos"),
        (["--sequences", "1,x"], "sequences"),
        (["--tokens", "1024"], "tokens"),
        (["--repeats", "0"], "repeats"),
        (["profile", "--seconds", "5"], "seconds"),
        (["--json", "nowhere/a.json"], "nowhere"),
        (["--shape", "2x128", "--model", "x"], "shape"),
        (["--routing", ".5,.5"], "routing"),
        (["--model", "no-such-folder"], "no-such-folder"),
    ],
)
def test_a_user_error_is_one_line_that_names_the_option(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    arguments: list[str],
    complaint: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, "bench", *arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert complaint in captured.err
