"""The pictures of docs/exactness.md, drawn small; what they rest on is held to what it should be."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree as ET

import pytest
import torch

from nvium_core import LLM
from tests.byte_model import load_byte_model
from tests.docs.pages import ROOT

LOADED = load_byte_model(context=64)
PROMPT = [5, 6, 7]
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def exactness() -> ModuleType:
    return drawing("exactness")


def drawing(name: str) -> ModuleType:
    """A program of docs/figures."""
    found = importlib.util.spec_from_file_location(name, ROOT / "docs" / "figures" / f"{name}.py")
    assert found and found.loader
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    found.loader.exec_module(module)
    return module


def test_the_command_on_the_page_draws_both_pictures(exactness: ModuleType, tmp_path: Path) -> None:
    exactness.main([str(tmp_path), "--draws", "40", "--stories", "2", "--tokens", "8"])
    assert sorted(path.name for path in tmp_path.glob("*.png")) == ["exactness.png", "steps.png"]


def test_every_draw_is_counted_and_all_that_is_expected_adds_up(exactness: ModuleType) -> None:
    counts_EV = exactness.first_tokens(LOADED.model, PROMPT, 50)
    joint_EV = exactness.explicit_joint(LOADED.model, PROMPT)[-1]
    assert counts_EV.sum() == 50
    assert float(joint_EV.sum()) == pytest.approx(1)
    told = exactness.stories(LOADED.model, PROMPT, 3, 10)
    sums = exactness.agreement(LOADED.model, PROMPT, told)
    assert 0 < float(sums.seen_C.sum()) <= 30
    assert float(sums.expected_C.sum()) == pytest.approx(30, abs=1)


def test_the_test_of_the_picture_tells_the_right_distribution_from_a_wrong_one(exactness: ModuleType) -> None:
    joint_EV = exactness.explicit_joint(LOADED.model, PROMPT)[-1]
    drawn = torch.multinomial(joint_EV.flatten(), 20_000, replacement=True, generator=torch.manual_seed(0))
    counts_EV = torch.bincount(drawn, minlength=joint_EV.numel()).reshape(joint_EV.shape).double()
    assert exactness.p_value(counts_EV, joint_EV) > 1e-3
    wrong_EV = joint_EV.clone()
    wrong_EV[0] *= 0.9
    wrong_EV[-1] *= 1 + 0.1 * joint_EV[0].sum() / joint_EV[-1].sum()
    assert exactness.p_value(counts_EV, wrong_EV) < 1e-3


def test_stories_agree_with_their_model_and_not_when_their_exits_are_others(exactness: ModuleType) -> None:
    told = exactness.stories(LOADED.model, PROMPT, 40, 20)
    assert exactness.agreement(LOADED.model, PROMPT, told).p_value > 1e-3
    for story in told:
        story.exits = [exit_ % LOADED.model.config.num_exits + 1 for exit_ in story.exits]
    assert exactness.agreement(LOADED.model, PROMPT, told).p_value < 1e-3


def test_the_staircase_has_every_row_once_in_each_block_it_passed_and_in_order(exactness: ModuleType) -> None:
    runs = exactness.lone_runs(LOADED.model, PROMPT, 20, seed=3)
    seen: dict[int, list[int]] = {}
    for run in runs:
        before = seen.get(run.block - 1, range(len(PROMPT) + 20))
        assert set(run.rows) <= set(before)
        seen.setdefault(run.block, []).extend(run.rows)
    for rows in seen.values():
        assert rows == list(range(len(rows)))
    assert sum(run.spoke for run in runs) == 20


@pytest.fixture(scope="module")
def stream() -> ModuleType:
    return drawing("stream")


def test_a_stream_is_recorded_and_every_token_of_it_appears_in_its_turn(stream: ModuleType, tmp_path: Path) -> None:
    told = stream.record(LLM(LOADED), "ab", 12, seed=3)
    picture = ET.fromstring(stream.drawn(told, "ab", [1, 2, 4]))
    begins = [float(one.get("keyTimes", "").split(";")[1]) for one in picture.iter(f"{SVG}animate")]
    assert len(begins) == len(told) == 12
    assert begins == sorted(begins)
    assert begins[-1] < 1
    legend = "".join(list(picture.iter(f"{SVG}text"))[-1].itertext())
    assert "exit 3 layer 4" in legend


def test_a_word_that_does_not_fit_begins_a_line(stream: ModuleType) -> None:
    told = [stream.Told(0.0, " " + "x" * 30, 1) for _ in range(4)]
    assert [line for _, line, _ in stream.placed(told, "Once")] == [0, 0, 1, 1]


def test_the_picture_of_the_readme_is_small() -> None:
    assert (ROOT / "docs" / "figures" / "stream.svg").stat().st_size < 40_000


def test_a_terminal_is_drawn_with_its_colours_and_moves_up_when_it_is_full() -> None:
    hour = drawing("first_hour")
    said = [("\x00ls\n", 0.1), ("\x1b[38;2;255;0;0mred\x1b[0m <text>\r\n", 0.5)]
    told = [hour.Told(at, text) for text, at in said] + [hour.Told(1 + n, f"line {n}\n") for n in range(hour.ROWS)]
    pieces = hour.laid_out(told)
    assert [(piece.row, piece.column, piece.text) for piece in pieces[:4]] == [
        (0, 0, "$ ls"),
        (1, 0, "red"),
        (1, 3, " <text>"),
        (2, 0, "line 0"),
    ]
    assert pieces[1].colour == "#ff0000"
    root = ET.fromstring(hour.drawn(pieces))
    assert [text.text for text in root.iter(f"{SVG}text")][1:3] == ["red", " <text>"]
    [moving] = root.iter(f"{SVG}animateTransform")
    assert moving.get("values") == f"0 0;0 {-hour.LINE};0 {-2 * hour.LINE}"
