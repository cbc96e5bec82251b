"""Tales that a model is led through, and what is kept of them."""

import json
import lzma
from itertools import islice
from pathlib import Path
from random import Random

import pytest
import torch
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from nvium_core.model.config import NviumConfig
from nvium_core.model.nvium import NviumForCausalLM
from nvium_core.training.tales import pack as packing
from nvium_core.training.tales.__main__ import app
from nvium_core.training.tales.filters import Filter, simple_words
from nvium_core.training.tales.narrator import MAX_PART_TOKENS, Narrator, Tale
from nvium_core.training.tales.pack import SEPARATOR, PackError, pack_tales, read_packed
from nvium_core.training.tales.plots import Plot, draw_plot, words
from nvium_core.training.tales.tell import missing_shards, read_shards, shard_numbers, write_shard
from tests.byte_model import END_OF_TEXT, byte_level_tokenizer

SENTENCE = "The small dog ran over the green hill to see what was behind the old red barn on the other side"
GOOD = " ".join(f"{SENTENCE} {n}." for n in ["one", "two", "three", "four", "five", "six"])
TEMPLATE = "{% for message in messages %}{{ message['content'] }}|{% endfor %}"
TALES = Path(__file__).parents[3] / "data" / "tales"
PIECES = [bytes([byte]) for byte in b"\n .|abcdefghijklmnopqrstuvwxyzMSTY"]


@pytest.fixture(scope="module")
def narrator() -> Narrator:
    """A model that says anything."""
    torch.manual_seed(0)
    config = NviumConfig(
        vocab_size=len(PIECES) + 1, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, adapter_hidden_size=0, max_position_embeddings=1024,
    )  # fmt: skip
    model = NviumForCausalLM(config)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level_tokenizer(PIECES), eos_token=END_OF_TEXT)
    tokenizer.chat_template = TEMPLATE
    return Narrator(model.eval(), tokenizer)


def plot(request: str = "Tell.") -> Plot:
    return Plot(request=request, parts=["Mia was small.", "She ran.", "The end."], name="Mia")


def tale(text: str, name: str = "Mia", is_whole: bool = True) -> Tale:
    return Tale(text, name, is_whole, num_tokens=len(text), num_own=0)


def test_every_sentence_of_a_plot_has_its_words() -> None:
    plots = [draw_plot(Random(seed)) for seed in range(500)]
    assert all(not set("{}") & set(" ".join([drawn.request, *drawn.parts])) for drawn in plots)
    assert all(drawn.name in " ".join(drawn.parts) for drawn in plots)
    assert len({drawn.request for drawn in plots}) > 400
    for turn in words()["turns"].values():
        assert len(turn) == 4


def test_a_tale_has_all_its_given_sentences_in_order_and_the_models_own_between(narrator: Narrator) -> None:
    tales = narrator.tell([plot(), plot("Tell me something longer."), plot("Tell it.")] * 20, seed=3)
    assert sum(told.is_whole for told in tales) > 1
    for told in tales:
        first, *others = told.text.split("\n\n")
        assert first.startswith("Mia was small.") and len(first) > len("Mia was small.")
        assert told.num_tokens - told.num_own >= len("Mia was small.")
        if told.is_whole:
            assert [part.split(".")[0] for part in others] == ["She ran", "The end"]
            assert told.text.endswith("The end.")
            assert told.num_own <= 2 * MAX_PART_TOKENS


def test_a_tale_depends_on_its_plot_and_seed_and_not_on_whoever_left_before(narrator: Narrator) -> None:
    plots = [plot(), plot(), plot()]
    assert narrator.tell(plots, seed=1) == narrator.tell(plots, seed=1)
    assert narrator.tell(plots, seed=1) != narrator.tell(plots, seed=2)


def test_telling_goes_on_with_the_first_shard_that_is_missing(tmp_path: Path) -> None:
    tales = [tale(GOOD), tale("no", is_whole=False)]
    for shard in (0, 2):
        write_shard(tmp_path, shard, tales)
    assert list(islice(missing_shards(tmp_path), 3)) == [1, 3, 4]
    assert list(islice(missing_shards(tmp_path, 2), 2)) == [3, 4]
    assert shard_numbers(tmp_path) == [0, 2]
    assert shard_numbers(tmp_path, 1) == [2] and shard_numbers(tmp_path, 0, 1) == [0]
    assert list(read_shards(tmp_path, [0, 2])) == tales * 2


@pytest.mark.parametrize(
    ("reason", "bad"),
    [
        ("no end", tale(GOOD, is_whole=False)),
        ("no end", tale(GOOD + " And then the")),
        ("length", tale("The dog ran.")),
        ("length", tale(" ".join(f"{SENTENCE} {n}." for n in range(20)))),
        ("not plain English letters", tale(GOOD + " Café.")),
        ("open quotation", tale(GOOD + ' "Yes.')),
        ("repeated sentence", tale(f"{GOOD} {SENTENCE} one.")),
        ("strange words", tale(GOOD + " A zyxw qwvut xyzzy.")),
        ("too many names", tale(GOOD + " She saw Max, and Tom, and Lily.")),
        ("near-duplicate", tale(GOOD + " The dog.")),
    ],
)
def test_each_fault_is_counted_under_its_name(reason: str, bad: Tale) -> None:
    test = Filter(simple_words(" ".join([GOOD, "and then she saw a yes max tom lily café"] * 20)))
    assert test.reason_against(tale(GOOD)) is None
    assert test.reason_against(bad) == reason


OTHER = GOOD.replace("dog", "cat").replace("ran", "went").replace("old", "big").replace("see", "find")
THIRD = OTHER.replace("small", "hungry").replace("hill", "wall").replace("red", "grey").replace("side", "bank")


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Three, of two tales each, and words.txt with all their words."""
    (tmp_path / "words.txt").write_text(f"{GOOD} {OTHER} {THIRD}" * 20, encoding="utf-8")
    for number, tales in enumerate(([GOOD, "no"], [OTHER, GOOD], [THIRD, OTHER])):
        write_shard(tmp_path, number, [tale(text) for text in tales])
    return tmp_path


def texts(file: Path) -> list[str]:
    return lzma.decompress(file.read_bytes()).decode().split(SEPARATOR)


def test_what_is_kept_is_packed_with_counts(shards: Path) -> None:
    packed = pack_tales(shards, shards / "tales.xz", shards / "words.txt", last=1)
    assert texts(shards / "tales.xz") == [GOOD, OTHER]
    assert (packed.num_told, packed.num_kept, packed.last_shard) == (4, 2, 1)
    assert packed.dropped["near-duplicate"] == 1 and packed.dropped["no end"] == 1
    assert json.loads((shards / "tales.json").read_text())["num_kept"] == 2
    assert str(packed).startswith("2 of 4 tales")


def test_new_tales_are_put_behind_a_text_whose_shards_are_gone_as_if_all_were_packed_at_once(shards: Path) -> None:
    at_once = pack_tales(shards, shards / "once.xz", shards / "words.txt")
    target = shards / "tales.xz"
    pack_tales(shards, target, shards / "words.txt", last=1)
    for shard in (0, 1):
        (shards / f"{shard:06}.jsonl").unlink()
    packed = pack_tales(shards, target, shards / "words.txt", first=2, after=target)
    assert packed == at_once
    assert packed.dropped["near-duplicate"] == 2
    assert texts(target) == texts(shards / "once.xz") == [GOOD, OTHER, THIRD]
    assert read_packed(target) == ([GOOD, OTHER, THIRD], packed)


def test_the_tales_of_a_text_are_not_filtered_again(shards: Path) -> None:
    pack_tales(shards, shards / "begun.xz", shards / "words.txt", last=1)
    (shards / "words.txt").write_text("a", encoding="utf-8")
    packed = pack_tales(shards, shards / "tales.xz", shards / "words.txt", first=2, after=shards / "begun.xz")
    assert texts(shards / "tales.xz") == [GOOD, OTHER]
    assert packed.dropped["strange words"] == 2


def test_no_tale_is_nearly_one_of_a_text_that_is_held_out(shards: Path) -> None:
    pack_tales(shards, shards / "held-out.xz", shards / "words.txt", first=2, last=2)
    pack_tales(shards, shards / "tales.xz", shards / "words.txt", last=1, unlike=[shards / "held-out.xz"])
    assert texts(shards / "held-out.xz") == [THIRD, OTHER]
    assert texts(shards / "tales.xz") == [GOOD]


def test_shards_that_a_text_has_are_not_counted_twice(shards: Path) -> None:
    target = shards / "tales.xz"
    pack_tales(shards, target, shards / "words.txt", last=1)
    before = target.read_bytes()
    with pytest.raises(PackError, match="has shards up to 1"):
        pack_tales(shards, target, shards / "words.txt", first=1, after=target)
    with pytest.raises(PackError, match="no such shards"):
        pack_tales(shards, target, shards / "words.txt", first=3, after=target)
    assert target.read_bytes() == before


@pytest.mark.parametrize(("first", "gone"), [(0, 1), (1, 1)])
def test_a_missing_shard_is_named_as_it_could_not_be_packed_behind_later_ones(
    shards: Path, first: int, gone: int
) -> None:
    (shards / f"{gone:06}.jsonl").unlink()
    with pytest.raises(PackError, match=r"000001\.jsonl: is missing"):
        pack_tales(shards, shards / "tales.xz", shards / "words.txt", first=first)
    assert not (shards / "tales.xz").exists()
    pack_tales(shards, shards / "tales.xz", shards / "words.txt", last=1)


def test_files_beside_the_shards_are_left_alone(shards: Path) -> None:
    for name in ("asked.jsonl", "7.jsonl"):
        (shards / name).write_text("{}", encoding="utf-8")
    assert pack_tales(shards, shards / "tales.xz", shards / "words.txt").last_shard == 2


@pytest.mark.parametrize("counts", ["", "{}", "gone"])
def test_a_text_without_its_counts_is_refused(shards: Path, counts: str) -> None:
    target, beside = shards / "tales.xz", shards / "tales.json"
    pack_tales(shards, target, shards / "words.txt", last=1)
    beside.unlink() if counts == "gone" else beside.write_text(counts)
    with pytest.raises(PackError, match=r"tales\.json"):
        read_packed(target)


def test_counts_of_another_text_are_refused(shards: Path) -> None:
    pack_tales(shards, shards / "tales.xz", shards / "words.txt", last=1)
    (shards / "tales.xz").write_bytes(lzma.compress(GOOD.encode()))
    with pytest.raises(PackError, match=r"counts 2 tales, tales\.xz has 1; restore both"):
        read_packed(shards / "tales.xz")


def test_a_text_stays_as_it_was_where_the_new_one_cannot_be_written(
    shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = shards / "tales.xz"
    packed = pack_tales(shards, target, shards / "words.txt", last=1)
    monkeypatch.setattr(packing.Path, "write_bytes", half_written)
    with pytest.raises(OSError, match="full"):
        pack_tales(shards, target, shards / "words.txt", first=2, after=target)
    assert read_packed(target) == ([GOOD, OTHER], packed)


def half_written(file: Path, content: bytes) -> None:
    with file.open("wb") as opened:
        opened.write(content[: len(content) // 2])
    raise OSError("the disk is full")


def test_the_command_puts_tales_behind_a_text_and_says_in_a_line_why_it_cannot(shards: Path) -> None:
    target = str(shards / "tales.xz")
    words_from = ["--words-from", str(shards / "words.txt")]
    told = CliRunner().invoke(app, ["pack", str(shards), target, *words_from, "--last", "1"])
    assert told.exit_code == 0 and told.output.startswith("2 of 4 tales")
    refused = CliRunner().invoke(app, ["pack", str(shards), target, *words_from, "--after", target])
    assert refused.exit_code == 2
    assert "has shards up to 1" in " ".join(refused.output.replace("│", " ").split())
    told = CliRunner().invoke(app, ["pack", str(shards), target, *words_from, "--after", target, "--first", "2"])
    assert told.output.startswith("3 of 6 tales")


@pytest.mark.parametrize("name", ["tales", "held-out"])
def test_the_packed_texts_of_this_repository_have_their_counts(name: str) -> None:
    documents, packed = read_packed(TALES / f"{name}.txt.xz")
    assert sum(map(len, documents)) == packed.num_characters


def test_no_held_out_tale_is_in_the_text_to_train_on() -> None:
    assert not set(read_packed(TALES / "held-out.txt.xz")[0]) & set(read_packed(TALES / "tales.txt.xz")[0])
