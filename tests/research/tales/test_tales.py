from pathlib import Path
from random import Random

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from nvium_core.model.causal_lm import NviumForCausalLM
from research.tales.filters import Filter, keeps_pronoun, returns_to, simple_words
from research.tales.names import invented_name
from research.tales.narrator import MAX_PART_TOKENS, Narrator, Tale
from research.tales.pack import pack_tales, read_packed
from research.tales.plots import Plot
from research.tales.tell import write_shard
from tests.byte_model import END_OF_TEXT, byte_level_tokenizer
from tests.random_models import small_config

SENTENCE = "The small dog ran over the green hill with Mia to see what was behind the old red barn on that side"
GOOD = " ".join(f"{SENTENCE} {n}." for n in ["one", "two", "three", "four", "five", "six"])
TEMPLATE = "{% for message in messages %}{{ message['content'] }}|{% endfor %}"
TALES = Path(__file__).parents[3] / "data" / "tales"
PIECES = [bytes([byte]) for byte in b"\n .|abcdefghijklmnopqrstuvwxyzMSTY"]


def plot(request: str = "Tell.") -> Plot:
    return Plot(request=request, parts=["Mia was small.", "She ran.", "The end."], name="Mia")


def tale(text: str, name: str = "Mia", is_whole: bool = True) -> Tale:
    return Tale(text, name, is_whole, num_tokens=len(text), num_own=0)


def test_a_tale_has_all_forced_sentences_in_order_with_generated_text_in_between():
    torch.manual_seed(0)
    model = NviumForCausalLM(small_config([2], vocab_size=len(PIECES) + 1, context=1024, adapter_hidden_size=0))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level_tokenizer(PIECES), eos_token=END_OF_TEXT)
    tokenizer.chat_template = TEMPLATE
    tales = Narrator(model.eval(), tokenizer).tell(
        [plot(), plot("Tell me something longer."), plot("Tell it.")] * 20, seed=3
    )
    assert sum(told.is_whole for told in tales) > 1
    for told in tales:
        first, *others = told.text.split("\n\n")
        assert first.startswith("Mia was small.") and len(first) > len("Mia was small.")
        assert told.num_tokens - told.num_own >= len("Mia was small.")
        if told.is_whole:
            assert [part.split(".")[0] for part in others] == ["She ran", "The end"]
            assert told.text.endswith("The end.")
            assert told.num_own <= 2 * MAX_PART_TOKENS


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
        ("no hero at the end", tale(GOOD, name="Max")),
        ("its thing does not return", tale(f"Mia lost a kite behind the old barn. {GOOD}")),
        ("another pronoun", tale(f"{GOOD} He ran.".replace("The small dog", "She", 1))),
        ("strange words", tale(GOOD + " A zyxw qwvut xyzzy.")),
        ("too many names", tale(GOOD + " She saw Max, and Tom, and Lily.")),
        ("near-duplicate", tale(GOOD + " The dog.")),
    ],
)
def test_each_dropped_tale_is_counted_by_its_reason(reason, bad):
    test = Filter(simple_words(" ".join([GOOD, "and then she saw a yes max tom lily café"] * 20)))
    assert test.reason_against(tale(GOOD)) is None
    assert test.reason_against(bad) == reason


OTHER = GOOD.replace("dog", "cat").replace("ran", "went").replace("old", "big").replace("see", "find")
THIRD = OTHER.replace("small", "hungry").replace("hill", "wall").replace("red", "grey").replace("side", "bank")


def test_kept_tales_are_packed_with_counts(tmp_path):
    (tmp_path / "words.txt").write_text(f"{GOOD} {OTHER} {THIRD}" * 20, encoding="utf-8")
    for number, tales in enumerate(([GOOD, "no"], [OTHER, GOOD], [THIRD, OTHER])):
        write_shard(tmp_path, number, [tale(text) for text in tales])
    packed = pack_tales(tmp_path, tmp_path / "tales.xz", tmp_path / "words.txt", last=1)
    assert read_packed(tmp_path / "tales.xz") == ([GOOD, OTHER], packed)
    assert (packed.num_told, packed.num_kept, packed.last_shard) == (4, 2, 1)
    assert packed.dropped["near-duplicate"] == 1 and packed.dropped["no end"] == 1
    assert str(packed).startswith("2 of 4 tales")


def test_a_story_returns_to_a_thing_that_its_last_two_thirds_mention():
    assert returns_to("key", "He ran. A fox had the keys, and he was glad.")
    assert not returns_to("key", "A key! He ran up the hill and slept.")


def test_a_pronoun_is_kept_unless_most_are_of_the_other_gender():
    for text, keeps in (("She and her cat saw him.", True), ("He saw his hat.", False), ("Nobody came.", True)):
        assert keeps_pronoun("Mia had lost her hat.", text) == keeps


def test_no_held_out_tale_is_in_the_training_text():
    assert not set(read_packed(TALES / "held-out.txt.xz")[0]) & set(read_packed(TALES / "tales.txt.xz")[0])


def test_invented_names_are_single_words_that_hardly_repeat():
    names = [invented_name(Random(seed)) for seed in range(500)]
    assert all(name.isalpha() and name.istitle() for name in names)
    assert len(set(names)) > 480
