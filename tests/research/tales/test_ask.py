import json
import re
from random import Random

from typer.testing import CliRunner

from nvium_core.training.data.texts import read_conversations
from research.stories.__main__ import MATERIAL, material
from research.tales.__main__ import app
from research.tales.ask import with_article
from research.tales.pack import SEPARATOR
from research.tales.plots import words
from research.tales.subject_tales import begun_with_its_thing, more_words, short_tale, with_other_subjects

OTTER = (
    "Long ago a shy otter named Lara lived by the river. Lara was a quiet otter.\n\n"
    'One day Lara found a train. "Whose is this train?" asked Lara.\n\n'
    "A white horse had lost the train. Lara smiled all the way home."
)


def test_a_tale_with_other_subjects_does_not_mention_the_first_ones():
    told = [with_other_subjects(OTTER, Random(seed)) for seed in range(100)]
    for each in told:
        assert each.hero and each.being and each.thing
        assert each.text.count(each.hero) >= OTTER.count("Lara")
        assert len(re.findall(rf"\b{each.being}\b", each.text)) == OTTER.count("otter")
        assert len(re.findall(rf"\b{each.thing}\b", each.text)) == OTTER.count("train")
        assert "white horse" in each.text
    assert len({(each.being, each.thing) for each in told}) > 60


def test_requests_name_nouns_with_adjectives_after_the_right_article():
    told = [with_other_subjects(OTTER, Random(seed), may_invent=True) for seed in range(200)]
    assert 20 < sum(each.thing.partition(" ")[0] in more_words()["qualities"] for each in told) < 60
    assert all(re.search(rf"\b{with_article(each.thing)}\b", each.text) for each in told)


def test_no_noun_of_the_requests_is_a_subject_of_the_first_evaluation_or_a_hero_s_name_of_any():
    more = {noun for field in ("being", "thing", "sight", "anything") for noun in more_words()[field]}
    assert {noun.split()[-1] for noun in more}.isdisjoint(subject.split()[-1] for subject in material()["subjects"])
    heroes = {hero.lower() for file in MATERIAL.parent.glob("*.yaml") for hero in material(file)["openings"]}
    assert len(heroes) > 190
    assert heroes.isdisjoint(more_words()["anything"])


def test_a_tale_can_begin_with_the_sentence_about_its_thing_and_keeps_the_rest():
    told = [short_tale(Random(seed)) for seed in range(100)]
    begun = [(begun_with_its_thing(each), each) for each in told]
    changed = [(one, other) for one, other in begun if one != other]
    assert len(changed) > 20
    for one, other in changed:
        assert other.text.endswith(f"\n\n{one.text}")
        assert all(re.search(rf"\b{noun}\b", one.text.partition("\n")[0]) for noun in (one.thing, one.hero))
        assert one.being == (other.being if other.being and re.search(rf"\b{other.being}\b", one.text) else None)


def test_the_command_writes_a_file_that_training_reads(tmp_path):
    (tmp_path / "tales").write_text(SEPARATOR.join([OTTER, "Ben ran. Ben fell."]))
    ran = CliRunner().invoke(app, ["ask", str(tmp_path / "tales"), str(tmp_path / "asked.jsonl"), "--times", "5"])
    assert ran.exit_code == 0
    read = read_conversations(tmp_path / "asked.jsonl")
    # a tale with a thing three times, the other once, and two short ones after each
    assert len(read) == 5 * (3 + 1) * 3
    assert {type(json.loads(line)) for line in (tmp_path / "asked.jsonl").read_text().splitlines()} == {dict}


def test_without_new_names_only_known_names_occur_unless_the_request_names_the_hero():
    known = {name for names in words()["names"].values() for name in names}
    told = [short_tale(Random(seed), new_names=False) for seed in range(50)]
    told += [with_other_subjects(OTTER, Random(seed), new_names=False) for seed in range(50)]
    assert {each.hero for each in told} <= known
    assert not {short_tale(Random(seed)).hero for seed in range(50)} <= known
