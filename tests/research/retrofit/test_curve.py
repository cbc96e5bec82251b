import json
from pathlib import Path

import pytest
import torch

from nvium_core.loading import LoadedModel
from nvium_core.model import mixture
from nvium_core.training.retrofitting.texts import read_text
from research.retrofit import curve as module
from research.retrofit.exits import shifted
from tests.byte_model import TURNS, wrapped_tokenizer
from tests.random_models import random_model


def price_percent(loaded: LoadedModel, talk: Path, shift: float) -> tuple[float, float, float]:
    """Compute perplexity increase, depth and share of equal argmaxes from forward passes over the held-out text."""
    gaps, depths, same = [], [], []
    for each in read_text(talk, loaded.tokenizer, 256, 1000).held_out:
        counted = torch.from_numpy(each.is_answer[1:])
        with torch.no_grad(), shifted(loaded.model, shift):
            tokens_BT = torch.from_numpy(each.tokens[None, :-1])
            out = loaded.model(tokens_BT, output_exit_logits=True)
            last_TV = out.exit_logits[0, :, -1].log_softmax(-1)
        mix, last = out.logits[0, counted], last_TV[counted]
        target = torch.from_numpy(each.tokens[1:])[counted, None]
        gaps.append((last - mix).gather(1, target))
        depths.append(mixture.mean_depth(out.exit_probs[0, counted].log(), [1, 2, 4]))
        same.append((mix.argmax(-1) == last.argmax(-1)).double())
    return 100 * torch.cat(gaps).mean().expm1().item(), float(torch.cat(depths).mean()), float(torch.cat(same).mean())


def test_a_point_equals_the_shifted_models_measures(tmp_path):
    talk = tmp_path / "talk.jsonl"
    said = [[{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{n} hens. "}] for n in range(80)]
    talk.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in said))
    loaded = LoadedModel("bytes", random_model([1, 2, 4], vocab_size=257, context=256), wrapped_tokenizer(TURNS))
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
