"""Tales told again of others."""

from pathlib import Path
from random import Random

from typer.testing import CliRunner

from nvium_core.training.data.documents import read_documents
from nvium_core.training.tales.__main__ import app
from nvium_core.training.tales.pack import SEPARATOR
from nvium_core.training.tales.plots import words
from nvium_core.training.tales.vary import hero_of, told_of_others, with_other_noun

LARA = 'Lara was a cow. Lara made an umbrella. "Look, Lara\'s umbrella!" said Tom. Everybody liked the umbrella.'
KNOWN = {name for names in words()["names"].values() for name in names}


def test_the_hero_has_one_other_name_everywhere_and_nobody_else_has() -> None:
    for seed in range(50):
        told = told_of_others(LARA, Random(seed))
        name = told.split()[0]
        assert told.count(name) == LARA.count("Lara")
        assert "said Tom" in told
        assert name not in KNOWN or name in words()["names"]["she"]


def test_half_of_the_names_are_invented() -> None:
    names = [told_of_others(LARA, Random(seed)).split()[0] for seed in range(400)]
    assert 0.4 < sum(name not in KNOWN for name in names) / len(names) < 0.6
    assert len({*names} - KNOWN) > 150


def test_another_thing_has_its_own_article() -> None:
    assert with_other_noun(LARA, "umbrella", "raft") == LARA.replace("an umbrella", "a raft").replace(
        "umbrella", "raft"
    )
    assert with_other_noun("A raft. The raft.", "raft", "umbrella") == "An umbrella. The umbrella."


def test_a_thing_that_is_said_in_the_plural_stays() -> None:
    told = [told_of_others(f"{LARA} She loved umbrellas.", Random(seed)) for seed in range(20)]
    assert all("an umbrella" in each for each in told)
    assert any("an umbrella" not in told_of_others(LARA, Random(seed)) for seed in range(20))


def test_a_tale_without_a_known_hero_stays() -> None:
    assert hero_of("The moon rose. Nobody saw it.") is None
    assert told_of_others("The moon rose. Nobody saw it.", Random(0)) == "The moon rose. Nobody saw it."


def test_the_command_writes_every_tale_as_it_is_and_then_of_others(tmp_path: Path) -> None:
    (tmp_path / "tales").write_text(SEPARATOR.join([LARA, "Ben ran. Ben fell."]))
    ran = CliRunner().invoke(app, ["vary", str(tmp_path / "tales"), str(tmp_path / "varied"), "--times", "3"])
    assert ran.exit_code == 0
    told = read_documents(tmp_path / "varied")
    assert len(told) == 6
    assert {*told[:2]} == {LARA, "Ben ran. Ben fell."}
    assert sum("ran." in each for each in told) == 3
