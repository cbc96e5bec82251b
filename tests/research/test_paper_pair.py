import json
import subprocess
import sys
from pathlib import Path

import pytest

from research import paper_pair
from research.paper_pair import TINY, Plan, known_total, main, set_total, tokens_in_time
from tests.training.small_runs import options, small_corpus, small_recipe, start

pytestmark = pytest.mark.slow


def run(folder, minutes):
    text = folder / "text.txt"
    if not text.exists():
        small_corpus(text)
    options = ["--data", str(text), "--validation", str(text), "--folder", str(folder / "pair")]
    main([*options, "--minutes", str(minutes), "--device", "cpu", "--tiny"])
    return json.loads((folder / "pair" / "pair.json").read_text(encoding="utf-8"))


def rates(folder, name):
    lines = (folder / "pair" / name / "log.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["step"] for line in lines]


def test_both_models_take_all_steps_and_are_compared_with_a_warning_of_each(tmp_path, capsys):
    found, printed = run(tmp_path, minutes=10), capsys.readouterr().out
    assert [caveat.partition(" has read")[0] for caveat in found["caveats"]] == ["nvium", "dense"]
    assert all(f"Warning: {caveat}." in printed for caveat in found["caveats"])
    assert found["steps"] == {"nvium": 60, "dense": 60}
    assert rates(tmp_path, "nvium") == rates(tmp_path, "dense") == list(range(1, 61))
    ratio = found["perplexity"] / found["twin"]["perplexity"]
    assert found["perplexity_gain_percent"] == pytest.approx(100 * (1 - ratio))
    assert all(part.stat().st_size < 2**24 for part in (tmp_path / "pair" / "parts").iterdir())


def test_the_parts_alone_continue_a_run_on_another_machine(tmp_path):
    (tmp_path / "one").mkdir()
    found = run(tmp_path / "one", minutes=0)
    (tmp_path / "two" / "pair").mkdir(parents=True)
    (tmp_path / "one" / "pair" / "parts").rename(tmp_path / "two" / "pair" / "parts")
    resumed = run(tmp_path / "two", minutes=10)
    assert resumed["steps"] == {"nvium": 60, "dense": 60}
    assert rates(tmp_path / "two", "nvium")[0] == found["steps"]["nvium"] + 1


def test_a_model_that_cannot_be_compiled_trains_eagerly(tmp_path, monkeypatch):
    def timed_step(_run):
        raise RuntimeError("no kernel")

    monkeypatch.setattr(paper_pair, "timed_step", timed_step)
    text, folder = small_corpus(tmp_path / "text.txt"), tmp_path / "pair"
    plan = Plan("tiny", TINY, data=text, validation=text, folder=folder, out=folder, seconds=0, turn=5, compile=True)
    runs = paper_pair.train_pair(plan)
    assert runs["nvium"].step == runs["dense"].step > 0
    assert not any(run.options.compile for run in runs.values())


LENGTHS = [(10, 1000.0, 90), (10, 30.0, 40), (10, 3.0, 13), (10, -5.0, 13)]
LENGTHS += [(50, 1000.0, 60), (50, 4.0, 54), (55, -1.0, 55)]


@pytest.mark.parametrize(("step", "seconds", "steps"), LENGTHS)
def test_the_length_of_a_run_follows_the_time_but_leaves_room_for_its_decay(step, seconds, steps, tmp_path):
    tiny = start(small_recipe("tokens_per_step=256", "total_tokens=15360"), options(tmp_path / "run"))
    tiny.step = step
    assert tokens_in_time(tiny, 90, 1.0, seconds) == 256 * steps
    set_total({"nvium": tiny}, 256 * steps)
    assert tiny.num_steps == steps


def test_without_the_servers_packages_and_without_time_both_models_decay_and_stop_at_the_same_step(tmp_path):
    small_corpus(text := tmp_path / "text.txt")
    missing = dict.fromkeys(("fastapi", "pydantic", "starlette", "structlog", "uvicorn"))
    files = f"'--data', {str(text)!r}, '--validation', {str(text)!r}, '--folder', {str(tmp_path / 'pair')!r}"
    script = f"""
import sys
sys.modules.update({missing})
from research import paper_pair
if __name__ == "__main__":
    paper_pair.main([{files}, "--minutes", "0", "--device", "cpu", "--tiny", "--out", {str(tmp_path / "out")!r}])
"""
    (tmp_path / "script.py").write_text(script)
    subprocess.run([sys.executable, tmp_path / "script.py"], check=True, timeout=300, cwd=Path.cwd())
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"parts", "pair.json"}
    steps = json.loads((tmp_path / "out" / "pair.json").read_text())["steps"]
    assert steps["nvium"] == steps["dense"] < 60
    assert known_total(tmp_path / "pair") == 256 * steps["nvium"]
