"""Tales that a model is led through, and what is kept of them."""

import json
import lzma
from itertools import count
from pathlib import Path
from random import Random

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from nvium_core.model.config import NviumConfig
from nvium_core.model.nvium import NviumForCausalLM
from nvium_core.training.tales.filters import Filter, simple_words
from nvium_core.training.tales.narrator import MAX_PART_TOKENS, Narrator, Tale
from nvium_core.training.tales.pack import SEPARATOR, pack_tales
from nvium_core.training.tales.plots import Plot, draw_plot, words
from nvium_core.training.tales.tell import missing_shards, read_shards, write_shard
from tests.byte_model import END_OF_TEXT, byte_level_tokenizer

SENTENCE = "The small dog ran over the green hill to see what was behind the old red barn on the other side"
GOOD = " ".join(f"{SENTENCE} {n}." for n in ["one", "two", "three", "four", "five", "six"])
TEMPLATE = "{% for message in messages %}{{ message['content'] }}|{% endfor %}"
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
    assert [shard for shard, _ in zip(missing_shards(tmp_path), range(3))] == [1, 3, 4]  # noqa: B905 (one is endless)
    assert list(read_shards(tmp_path)) == tales * 2


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


def test_what_is_kept_is_packed_with_counts(tmp_path: Path) -> None:
    other = GOOD.replace("dog", "cat").replace("ran", "went").replace("old", "big").replace("see", "find")
    numbers = count()
    for tales in ([tale(GOOD), tale("no")], [tale(other), tale(GOOD)]):
        write_shard(tmp_path, next(numbers), tales)
    (tmp_path / "words.txt").write_text(f"{GOOD} {other}" * 20, encoding="utf-8")
    packed = pack_tales(tmp_path, tmp_path / "tales.xz", tmp_path / "words.txt")
    assert lzma.decompress((tmp_path / "tales.xz").read_bytes()).decode() == GOOD + SEPARATOR + other
    assert (packed.num_told, packed.num_kept) == (4, 2)
    assert packed.dropped["near-duplicate"] == 1 and packed.dropped["no end"] == 1
    assert json.loads((tmp_path / "tales.json").read_text())["num_kept"] == 2
    assert str(packed).startswith("2 of 4 tales")
