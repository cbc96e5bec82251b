"""Questions that tales answer."""

import json
import re
from pathlib import Path
from random import Random

import pytest
from typer.testing import CliRunner

from nvium_core.evaluation.stories import material
from nvium_core.training.chat.conversations import read_conversations
from nvium_core.training.tales.__main__ import app
from nvium_core.training.tales.ask import WAYS, asked
from nvium_core.training.tales.pack import SEPARATOR
from nvium_core.training.tales.plots import words
from nvium_core.training.tales.told import being_of, more_words, nouns, short_tale, thing_of, told_of_others

OTTER = (
    "Long ago a shy otter named Lara lived by the river. Lara was a quiet otter.\n\n"
    'One day Lara found a train. "Whose is this train?" asked Lara.\n\n'
    "A white horse had lost the train. Lara smiled all the way home."
)
NOUNS = ("being", "thing", "sight", "anything")
SHORT = [short_tale(Random(seed)) for seed in range(400)]


def test_the_hero_is_what_the_beginning_names_and_not_whom_it_meets() -> None:
    assert being_of(OTTER) == "otter"
    assert being_of("The moon rose. It was late. An otter swam.") is None


def test_the_thing_is_what_is_said_often_and_is_once_new() -> None:
    assert thing_of(OTTER) == "train"
    assert thing_of(OTTER.replace("a train", "the train")) is None
    assert thing_of("She had a train.") is None


def test_a_tale_told_of_others_has_nothing_of_the_first_ones_left() -> None:
    told = [told_of_others(OTTER, Random(seed)) for seed in range(100)]
    for each in told:
        assert each.hero and each.being and each.thing
        assert each.text.count(each.hero) >= OTTER.count("Lara")
        assert len(re.findall(rf"\b{each.being}\b", each.text)) == OTTER.count("otter")
        assert len(re.findall(rf"\b{each.thing}\b", each.text)) == OTTER.count("train")
        assert "white horse" in each.text
    assert len({(each.being, each.thing) for each in told}) > 60


def test_only_a_tale_that_is_asked_for_by_its_nouns_may_have_invented_ones() -> None:
    known = {noun for field in NOUNS for noun in nouns(field)} | {"girl", "boy"}
    for may_invent in (False, True):
        told = [short_tale(Random(seed), may_invent=may_invent) for seed in range(200)]
        told += [told_of_others(OTTER, Random(seed), may_invent=may_invent) for seed in range(200)]
        strange = [noun for each in told for noun in (each.being, each.thing) if noun and noun not in known]
        assert bool(strange) == may_invent
        assert len({*strange}) >= 0.9 * len(strange)


def test_a_noun_that_is_said_in_the_plural_stays() -> None:
    plural = f"{OTTER} All otters like trains."
    told = [told_of_others(plural, Random(seed)) for seed in range(20)]
    assert {(each.being, each.thing) for each in told} == {("otter", "train")}


def test_a_short_tale_names_its_hero_in_the_beginning_and_has_all_its_words() -> None:
    for told in SHORT:
        assert told.hero and told.hero in told.text.split("\n\n")[0] + told.text.split("\n\n")[1]
        assert not set("{}") & set(told.text)
        assert "  " not in told.text
        assert 6 <= len(told.text.split("\n\n")) <= 7


def test_a_short_tale_says_what_it_can_be_asked_for_by() -> None:
    for told in SHORT:
        for noun in filter(None, (told.being, told.thing)):
            assert re.search(rf"\b{noun}\b", told.text)
    assert 0.4 < sum(told.thing is not None for told in SHORT) / len(SHORT) < 0.75


def test_no_noun_but_a_plots_own_is_a_subject_of_the_evaluation() -> None:
    subjects = {subject.split()[-1] for subject in material()["subjects"]}
    assert not subjects & {noun for field in NOUNS for noun in more_words()[field]}


def test_no_opening_is_one_of_the_evaluation() -> None:
    heroes = {name for names in words()["names"].values() for name in names}
    for hero, opening in material()["openings"].items():
        assert hero not in heroes
        assert not any(opening.replace(hero, "{name}").startswith(known[:30]) for known in more_words()["openings"])


def test_nouns_and_openings_are_there_once() -> None:
    for known in (more_words()["openings"], *map(nouns, NOUNS)):
        assert len({*known}) == len(known)


@pytest.fixture(scope="module")
def lines() -> list[object]:
    return list(asked([OTTER] * 200, times=1, seed=0))


def test_every_line_is_a_tale_or_a_question_with_its_answer(lines: list[object]) -> None:
    conversations = [line for line in lines if isinstance(line, list)]
    assert abs(1 - len(conversations) / len(lines) - WAYS["text"]) < 0.05
    for conversation in conversations:
        assert [message["role"] for message in conversation][-2:] == ["user", "assistant"]


def test_a_tale_is_told_by_what_it_was_asked_for(lines: list[object]) -> None:
    found = 0
    for line in lines:
        if isinstance(line, list) and (named := re.search(r"story about an? ([a-z]+)", line[-2]["content"])):
            assert re.search(rf"\b{named[1]}\b", line[-1]["content"])
            found += 1
    assert found > 100


def test_lines_depend_on_the_seed_only(lines: list[object]) -> None:
    assert lines == list(asked([OTTER] * 200, times=1, seed=0))
    assert lines != list(asked([OTTER] * 200, times=1, seed=1))


def test_the_command_writes_what_training_reads(tmp_path: Path) -> None:
    (tmp_path / "tales").write_text(SEPARATOR.join([OTTER, "Ben ran. Ben fell."]))
    ran = CliRunner().invoke(app, ["ask", str(tmp_path / "tales"), str(tmp_path / "asked.jsonl"), "--times", "5"])
    assert ran.exit_code == 0
    read = read_conversations(tmp_path / "asked.jsonl")
    assert (
        len(read) == 5 * (3 + 1) * 3
    )  # a tale with a thing three times, the other once, and two short ones after each
    assert {type(json.loads(line)) for line in (tmp_path / "asked.jsonl").read_text().splitlines()} == {dict}
