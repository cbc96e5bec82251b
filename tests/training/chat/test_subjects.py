import pytest

from nvium_core.training.chat.subjects import Subjects

FOX = "A fox came to a crow. The fox was sly, and the crow had an old cheese. The old fox said that the day was fine."
KINGS = ["A king was here. The king of the land had gold, and the gold was red."] * 30
OTHERS = [*KINGS, *["The hare ran. A hare is quick, and the hare was glad."] * 30, FOX]


@pytest.fixture(scope="module")
def subjects() -> Subjects:
    return Subjects(OTHERS)


def test_a_tale_is_about_the_nouns_that_it_repeats(subjects: Subjects) -> None:
    assert subjects.of(FOX) == ["a crow", "a fox"]


def test_adjectives_and_nouns_of_every_tale_are_no_subjects(subjects: Subjects) -> None:
    text = "The old man ran. The old man sat. The day was old, and the day was long. "
    text += "The man was glad, and the man had bread."
    assert subjects.of(text) == ["the man"]


def test_what_other_tales_lack_comes_first(subjects: Subjects) -> None:
    assert subjects.of("The king of the owl, the king and the owl.")[0] == "the owl"
    assert subjects.of("The king of the owl, the king and the owl.")[1] == "a king"


def test_no_more_are_named_than_asked_for(subjects: Subjects) -> None:
    assert len(subjects.of(FOX, most=1)) == 1


def test_a_noun_has_the_article_that_tales_give_it(subjects: Subjects) -> None:
    assert subjects.of(KINGS[0]) == ["a king"]
    assert Subjects(["An owl is here. The owl was old."]).of("The owl and the owl.") == ["an owl"]


def test_names_are_subjects_and_words_that_begin_sentences_are_not(subjects: Subjects) -> None:
    assert subjects.of("Then came Anansi, and so Anansi ate. Then Anansi went. Then it rained.") == ["Anansi"]


def test_of_a_name_of_two_words_the_last_counts(subjects: Subjects) -> None:
    assert subjects.of("They saw Robin Hood, and so they met Robin Hood.") == ["Hood"]


def test_animals_that_are_called_by_what_they_are_are_taken_for_it(subjects: Subjects) -> None:
    assert subjects.of("One day Hare met Anansi, and then Hare ran from Anansi.") == ["Anansi", "a hare"]


@pytest.mark.parametrize("text", ["", "A fox. The owl was here.", "12 34, the.", "\n\n"])
def test_a_tale_without_a_repeated_noun_is_about_nothing(text: str, subjects: Subjects) -> None:
    assert subjects.of(text) == []
