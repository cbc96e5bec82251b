"""The curve of a small random model, beside the same model asked for π_mix at every shift."""

import json
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from nvium_core import NviumForCausalLM, load_model
from nvium_core.evaluation import retrofit_curve as module
from nvium_core.evaluation.retrofit_answers import QUESTIONS, num_right
from nvium_core.loading import LoadedModel
from nvium_core.model import mixture
from nvium_core.training.retrofitting.steering import shifted
from nvium_core.training.retrofitting.texts import read_text
from tests.byte_model import END_OF_TEXT, byte_tokenizer
from tests.random_models import random_model
from tests.training.retrofitting.test_self_talk import TEMPLATE


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("retrofitted")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer(), eos_token=END_OF_TEXT)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(made)
    random_model([1, 2, 4], vocab_size=257, context=256).save_pretrained(made)
    return made


@pytest.fixture(scope="module")
def talk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("talk") / "talk.jsonl"
    said = [[{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{n} hens. "}] for n in range(80)]
    file.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in said))
    return file


def price_percent(
    loaded: LoadedModel, talk: Path, shift: float, original: NviumForCausalLM | None = None
) -> tuple[float, float, float]:
    """Price in percent, depth and share of equal argmaxes by the models' own forward passes over what is held out."""
    gaps, depths, same = [], [], []
    for each in read_text(talk, loaded.tokenizer, 256, 1000).held_out:
        counted = torch.from_numpy(each.is_answer[1:])
        with torch.no_grad(), shifted(loaded.model, shift):
            tokens_BT = torch.from_numpy(each.tokens[None, :-1])
            out = loaded.model(tokens_BT, output_exit_logits=True)
            last_TV = original(tokens_BT).logits[0] if original else out.exit_logits[0, :, -1].log_softmax(-1)
        mix, last = out.logits[0, counted], last_TV[counted]
        target = torch.from_numpy(each.tokens[1:])[counted, None]
        gaps.append((last - mix).gather(1, target))
        depths.append(mixture.mean_depth(out.exit_probs[0, counted].log(), [1, 2, 4]))
        same.append((mix.argmax(-1) == last.argmax(-1)).double())
    return 100 * torch.cat(gaps).mean().expm1().item(), float(torch.cat(depths).mean()), float(torch.cat(same).mean())


def test_a_point_is_what_the_shifted_model_says(folder: Path, talk: Path) -> None:
    loaded = load_model(str(folder), "cpu", "float64")
    found = module.curve(loaded, talk, depths=(0.9, 0.6))
    assert [point["asked_depth"] for point in found["points"]] == [None, 0.9, 0.6]
    for point in found["points"]:
        price, depth, same = price_percent(loaded, talk, point["shift"])
        assert point["price_percent"] == pytest.approx(price, abs=1e-3)
        assert point["depth"] == pytest.approx(depth, abs=1e-6)
        assert point["same_argmax"] == pytest.approx(same, abs=1e-9)
        low, high = point["price_interval_percent"]
        assert low < price < high
        low, high = point["same_argmax_interval"]
        assert low <= same <= high
    assert [point["depth"] for point in found["points"][1:]] == pytest.approx([0.9, 0.6], abs=1e-6)


def test_all_of_an_unseen_text_counts_and_the_end_of_another(folder: Path, talk: Path) -> None:
    loaded = load_model(str(folder), "cpu", "float64")
    end, whole = (module.curve(loaded, talk, (0.9,), is_unseen=unseen) for unseen in (False, True))
    assert whole["documents"] == 80 > end["documents"] > 0


def test_prices_of_a_trained_backbone_are_over_the_original(folder: Path, talk: Path) -> None:
    loaded, original = load_model(str(folder), "cpu", "float64"), random_model([4], vocab_size=257, context=256)
    original.lm_head.weight.data.copy_(loaded.model.lm_head.weight)
    _, found = module.curve(loaded, talk, depths=(0.6,), original=original)["points"]
    price, _, same = price_percent(loaded, talk, found["shift"], original)
    assert found["price_percent"] == pytest.approx(price, abs=1e-3)
    assert found["same_argmax"] == pytest.approx(same, abs=1e-9) != 1


def test_an_original_is_asked_for_where_the_last_exit_is_none(
    folder: Path, talk: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        module.main([str(folder), "--text", f"own={talk}", "--json", str(tmp_path / "curve.json")])
    assert "its last exit is not the original" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        module.main([str(folder), "--json", str(tmp_path / "curve.json")])
    assert "name a text" in capsys.readouterr().err


def test_the_command_writes_curve_answers_and_plot(folder: Path, talk: Path, tmp_path: Path) -> None:
    written, drawn = tmp_path / "curve.json", tmp_path / "curve.png"
    source = tmp_path / "source"
    random_model([4], vocab_size=257, context=256).save_pretrained(source)
    load_model(str(folder)).tokenizer.save_pretrained(source)
    asked = [str(folder), "--original", str(source), "--text", f"own={talk}", "--unseen", f"all={talk}"]
    module.main([*asked, "--json", str(written), "--plot", str(drawn)])
    found = json.loads(written.read_text())
    assert found["exit_layers"] == [1, 2, 4] and [*found["texts"]] == ["own", "all"]
    assert [row["depth"] for row in found["answers"]["mixture"]] == pytest.approx(module.ANSWERED_DEPTHS, abs=1e-6)
    assert all(0 <= row["equal"] <= len(QUESTIONS) == len(row["answers"]) for row in found["answers"]["mixture"])
    assert drawn.read_bytes().startswith(b"\x89PNG")


def test_an_answer_is_right_that_has_the_word() -> None:
    assert num_right(["It is Paris.", "There are 7.", "Red", "the earth", *["no"] * 6]) == 3
