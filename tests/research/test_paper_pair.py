import json
import subprocess
import sys

import pytest

from research.paper_pair import known_total, main
from tests.training.small_runs import small_corpus

pytestmark = pytest.mark.slow


def run(folder, minutes):
    text = folder / "text.txt"
    if not text.exists():
        small_corpus(text)
    main(
        [
            *("--data", str(text), "--validation", str(text), "--folder", str(folder / "pair")),
            *("--minutes", str(minutes), "--device", "cpu", "--tiny"),
        ]
    )
    return json.loads((folder / "pair" / "pair.json").read_text(encoding="utf-8"))


def rates(folder, name):
    lines = (folder / "pair" / name / "log.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["step"] for line in lines]


def test_both_models_take_all_steps_and_are_compared(tmp_path):
    found = run(tmp_path, minutes=10)
    assert found["steps"] == {"nvium": 60, "dense": 60}
    assert rates(tmp_path, "nvium") == rates(tmp_path, "dense") == list(range(1, 61))
    ratio = found["perplexity"] / found["twin"]["perplexity"]
    assert found["perplexity_gain_percent"] == pytest.approx(100 * (1 - ratio))
    assert all(part.stat().st_size < 2**24 for part in (tmp_path / "pair" / "parts").iterdir())


def test_when_the_time_is_up_both_models_decay_and_stop_at_the_same_step(tmp_path):
    found = run(tmp_path, minutes=0)
    assert found["steps"]["nvium"] == found["steps"]["dense"] < 60
    assert known_total(tmp_path / "pair") == 256 * found["steps"]["nvium"]


def test_the_parts_alone_continue_a_run_on_another_machine(tmp_path):
    (tmp_path / "one").mkdir()
    found = run(tmp_path / "one", minutes=0)
    (tmp_path / "two" / "pair").mkdir(parents=True)
    (tmp_path / "one" / "pair" / "parts").rename(tmp_path / "two" / "pair" / "parts")
    resumed = run(tmp_path / "two", minutes=10)
    assert resumed["steps"] == {"nvium": 60, "dense": 60}
    assert rates(tmp_path / "two", "nvium")[0] == found["steps"]["nvium"] + 1


def test_the_script_needs_neither_fastapi_nor_pydantic():
    blocked = "import sys; sys.modules.update(fastapi=None, pydantic=None); import research.paper_pair"
    subprocess.run([sys.executable, "-c", blocked], check=True, timeout=120)
