"""Stories are told, counted and shown, all of them."""

import json
from pathlib import Path

import pytest

from nvium_core.evaluation.stories import COUNTS, MATERIAL, Story, keeps_to, main, material
from nvium_core.training.tales.plots import words


def story(text: str, ended: bool = True) -> Story:
    return Story("Juniper", "Once there was an otter called Juniper.", text, ended)


def test_openings_and_subjects_are_as_many_as_said_and_new_to_the_tales() -> None:
    heroes = {*material()["openings"]}
    assert len(heroes) == 40
    assert all(hero in opening for hero, opening in material()["openings"].items())
    assert not heroes & {name for names in words()["names"].values() for name in names}
    assert len({*material()["subjects"]}) == 100


@pytest.mark.parametrize(
    ("text", "keeps", "repeats"),
    [
        ("He swam far. He came home, and everybody liked Juniper.", True, False),
        ("Juniper swam far away. Then came a bear, and Tom was very glad at last.", False, False),
        ("He swam to the sea. He swam to the sea. It was Juniper's sea.", True, True),
        ("", False, False),
    ],
)
def test_what_is_counted(text: str, keeps: bool, repeats: bool) -> None:
    assert COUNTS["keep_their_hero"](story(text)) == keeps
    assert COUNTS["repeat_a_sentence"](story(text)) == repeats
    assert not COUNTS["end"](story(text, ended=False))


@pytest.mark.parametrize(
    ("subject", "answer", "keeps"),
    [
        ("a fairy", "All the fairies sang.", True),
        ("a wolf", "Two wolves came.", True),
        ("an apple", "An Apple fell.", True),
        ("a fairy", "It was not fair.", False),
        ("a mouse", "The mice's feast.", True),
        ("a star", "They started, and stared.", False),
        ("a horse", "The horse's tail.", True),
        ("a cat", "It was a location.", False),
        ("a cat", "", False),
    ],
)
def test_a_story_keeps_to_its_subject_by_the_noun_or_its_plural(subject: str, answer: str, keeps: bool) -> None:
    assert keeps_to(subject, answer) == keeps


def test_every_story_is_in_the_page_and_counted(tmp_path: Path) -> None:
    page, figures = tmp_path / "stories.md", tmp_path / "stories.json"
    main(["--openings", "3", "--subjects", "2", "--max-tokens", "24", "--markdown", str(page), "--json", str(figures)])
    (found,) = json.loads(figures.read_text())
    assert (found["num_stories"], found["num_asked"], found["model"]) == (3, 2, "stories-9m")
    assert all(0 <= found[name] <= 3 for name in COUNTS)
    text = page.read_text()
    assert (text.count("**stories-9m**"), text.count("\n> … "), text.count("## A story about ")) == (5, 3, 2)
    assert all(opening in text for opening in [*material()["openings"].values()][:3])


def test_fresh_openings_and_subjects_are_none_of_the_others() -> None:
    known, fresh = material(), material(MATERIAL.with_name("fresh_stories.yaml"))
    assert (len(fresh["openings"]), len(set(fresh["subjects"]))) == (40, 100)
    assert known["openings"].keys().isdisjoint(fresh["openings"]) and not {*known["subjects"]} & {*fresh["subjects"]}
    assert all(hero in opening for hero, opening in fresh["openings"].items())
