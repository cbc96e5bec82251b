from collections import Counter

from nvium_core.training.data.documents import Diet, simplicity, without_title


def words(prefix: str, first: int, count: int) -> str:
    return " ".join(prefix + "".join(chr(97 + int(digit)) for digit in str(n)) for n in range(first, first + count))


SIMPLE = [f"{n}\n\n{words('x', n % 100 * 10, 10)}" for n in range(200)]
"""Documents of a thousand words that occur twice."""

HARD = [f"{n}\n\n{words('rare', n * 20, 20)}" for n in range(200)]
"""Documents of words that occur once."""


def test_simplicity_is_the_share_of_the_thousand_most_common_words():
    half = f"{words('x', 0, 10)} {words('rarest', 0, 10)}"
    assert simplicity([*SIMPLE, *HARD, half]).tolist() == [1.0] * 200 + [0.0] * 200 + [0.5]


def test_part_of_an_epoch_reads_that_share_of_documents_in_an_order_that_depends_on_the_seed_only():
    documents = [f"Title\n\ntale {number}" for number in range(400)]
    counts = Counter(Diet(other_epochs=1.25).readings(documents, seed=0))
    assert set(counts.values()) == {1, 2}
    assert 460 <= counts.total() <= 540
    diet = Diet(other_epochs=1.5)
    assert diet.readings(HARD, 1) == diet.readings(HARD, 1) != diet.readings(HARD, 2)


def test_short_documents_count_as_simple():
    diet = Diet(short_characters=max(map(len, SIMPLE)), simple_epochs=2.0, other_epochs=0.0)
    read = diet.readings(SIMPLE + HARD, seed=0)
    assert len(read) == 2 * len(SIMPLE) and not any("rare" in text for text in read)


def test_the_simplest_share_of_characters_counts_as_simple():
    share = sum(map(len, SIMPLE)) / sum(map(len, SIMPLE + HARD))
    read = Diet(simple_share=share / 2, simple_epochs=2.0, other_epochs=0.0).readings(HARD + SIMPLE, seed=0)
    assert not any("rare" in text for text in read)
    assert abs(len(read) - len(SIMPLE)) <= 4


def test_a_share_of_the_readings_has_no_title_if_requested():
    assert 70 <= sum("\n\n" in text for text in Diet(untitled_share=0.5).readings(SIMPLE, seed=0)) <= 130
    assert all("\n\n" in text for text in Diet().readings(SIMPLE, seed=0))


def test_a_title_is_a_single_line_above_a_blank_one():
    assert without_title("Title\n\nText\n\nmore") == "Text\n\nmore"
    for untitled in ("Text", "Two\nlines\n\nText", "A fox lived here.\n\nIt sang.", 'It said, "Oh!"\n\nIt ran.'):
        assert without_title(untitled) == untitled
