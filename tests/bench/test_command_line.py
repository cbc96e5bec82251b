import json
import shutil
from pathlib import Path

import pytest

from tests.byte_model import save_byte_model


@pytest.fixture(scope="module")
def byte_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_byte_model(tmp_path_factory.mktemp("models") / "bytes", context=600)


def test_the_default_experiment_is_peers(nvium, tmp_path, byte_model):
    figures = tmp_path / "figures.json"
    small = ("--model", byte_model, "--dtype", "float64", "--tokens", 3, "--seconds", 1, "--against", "dense twin")
    shown = nvium("bench", "--json", figures, *small).out
    assert shown.startswith("Early exits compared with full depth: 1 stream ")
    assert "…" not in shown
    written = json.loads(figures.read_text())
    assert (written["experiment"], written["model"], written["dtype"]) == ("peers", "bytes", "float64")
    assert written["command"] and written["processor"] and "commit" in written
    assert [row["sequences"] for row in written["rows"]] == [1, 8]
    machine = written["machine"]
    assert machine["threads"] == written["threads"] >= 1
    assert machine["instructions"] == written["instructions"]
    assert min(machine["bytes_per_second"], machine["flops_per_second"]["float64"]) > 0
    assert all(row["ours_over"]["dense twin"] > 0 for row in written["rows"])
    assert all(row["ours_over_turns"]["dense twin"] >= 1 for row in written["rows"])
    (prompt,) = written["prompts"]  # the one of 2,048 tokens is longer than the context
    assert (prompt["tokens"], prompt["ours_over"]["dense twin"] > 0) == (512, True)


def test_schedules_are_compared_with_a_warning_if_the_model_has_read_too_little(nvium, byte_model, tmp_path):
    shutil.copytree(byte_model, tmp_path / "moved")
    config = tmp_path / "moved" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"training_tokens": 10}))
    small = ("--model", tmp_path / "moved", "--tokens", 4, "--repeats", 1, "--sequences", "1,2")
    shown = " ".join(nvium("bench", "schedules", "--json", tmp_path / "figures.json", *small).out.split())
    assert "1 stream too few turns (1 of 3)" in shown
    [caveat] = json.loads((tmp_path / "figures.json").read_text())["caveats"]
    assert "moved has read" in caveat and shown.startswith(f"Warning: {caveat}.")


def test_tied_blocks_are_compared_with_what_their_costs_allow(nvium, tmp_path):
    figures = tmp_path / "figures.json"
    shape = ("--shape", "2x64", "--loops", 3, "--routing", ".5,.3,.2", "--sequences", "1,2")
    shown = nvium("bench", "schedules", *shape, "--tokens", 4, "--repeats", 2, "--json", figures).out
    assert "possible" in shown and "share of race" in shown
    rows = json.loads(figures.read_text())["rows"]
    assert [[*row["limit"]["pass_ms"]] for row in rows] == [["1", "2", "4"], ["2", "4", "8"]]
    for row in rows:
        assert row["limit"]["over_whole"] >= 1 and row["limit"]["share_reached"] > 0
        assert row["limit"]["over_whole_turns"] == row["schedules"]["race"]["over_whole_turns"] == 2


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
        (["--loops", "2"], "loops"),
        (["--shape", "4x64", "--loops", "0"], "loops"),
        (["--model", "no-such-folder"], "no-such-folder"),
    ],
)
def test_a_user_error_is_one_line_that_names_the_option(nvium, monkeypatch, tmp_path, arguments, complaint):
    monkeypatch.chdir(tmp_path)
    assert complaint in nvium.refuses("bench", *arguments)
