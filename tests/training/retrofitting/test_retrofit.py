import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nvium_core import NviumForCausalLM, load_model
from nvium_core.choices import ExitTarget
from nvium_core.errors import DataError, TrainingError
from nvium_core.loading import source_tokenizer
from nvium_core.model import mixture
from nvium_core.model.config import NviumConfig
from nvium_core.model.exits import CONTINUE, EXIT
from nvium_core.options import RetrofitSettings
from nvium_core.training.data.windows import Batch, PackedConversations, Windows
from nvium_core.training.loggers import Report
from nvium_core.training.retrofitting import model as model_module
from nvium_core.training.retrofitting import retrofit as command
from nvium_core.training.retrofitting import run as module
from nvium_core.training.retrofitting.retrofit import checked_config
from nvium_core.training.retrofitting.run import measure
from nvium_core.training.retrofitting.texts import read_text
from tests.byte_model import wrapped_tokenizer

pytestmark = pytest.mark.usefixtures("few_tokens_a_step")

IDS = torch.randint(1, 257, (2, 30), generator=torch.Generator().manual_seed(0))
TOKENS = 12 * 1024


def settings(llama: Path, data: Path, target: Path, tokens: int = TOKENS) -> RetrofitSettings:
    return RetrofitSettings(source=str(llama), target=target, data=data, exits="1,3", tokens=tokens, depth=0.8)


def retrofit(asked: RetrofitSettings) -> None:
    command.retrofit(asked, source_tokenizer(asked.source))


@torch.no_grad()
def exit_logits(model: NviumForCausalLM) -> Tensor:
    return model(IDS, output_exit_logits=True).exit_logits


def with_exits(asked: RetrofitSettings) -> NviumForCausalLM:
    return NviumForCausalLM.from_pretrained(asked.source, exits=asked.target)


def test_the_command_writes_exits_that_serve_with_their_base_and_a_table(nvium, monkeypatch, llama, data, tmp_path):
    target = tmp_path / "retrofitted"
    asked = ["retrofit", llama, target, "--data", data, "--exits", "1,3", "--tokens", TOKENS]
    monkeypatch.setenv("COLUMNS", "80")
    printed = nvium(*asked).out
    assert "layer 3" in printed and "mixture" in printed and "…" not in printed
    assert f"nvium chat {llama} --exits {target}" in printed.replace("\n", "") and "--sampling exits" in printed
    loaded = load_model(str(llama), exits=str(target))
    assert loaded.model.config.exit_layers == [1, 3, 4] and loaded.model.config.default_sampling == "original"
    assert {path.name for path in target.iterdir()} == {"exits.safetensors", "exits.json", "retrofit"}
    result = json.loads((target / "exits.json").read_text())
    assert result["base"]["name"] == llama.name and result["text"][0]["name"] == data.name
    assert result["licence"] == "mit"
    found = result["measured"]["text"]
    assert [exit_["layer"] for exit_ in found["exits"]] == [1, 3, 4]
    assert found["exits"][-1]["kl"] == 0.0
    assert found["texts"] == 5 and f"± {found['price_error']:.1%}" in printed
    assert len((target / "retrofit/log.jsonl").read_text().splitlines()) == TOKENS // 512


def test_one_held_out_text_has_no_standard_error_and_a_base_that_has_read_too_little_a_warning(
    nvium, monkeypatch, llama, tmp_path
):
    base, data = tmp_path / "base", tmp_path / "text.txt"
    NviumForCausalLM.from_pretrained(llama).save_pretrained(base)
    wrapped_tokenizer().save_pretrained(base)
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"training_tokens": 100}))
    data.write_text("One fox met two hens. " * 300)
    asked = ["retrofit", base, tmp_path / "target", "--data", data, "--exits", "1,3", "--tokens", 1024]
    printed = nvium(*asked)
    assert "±" not in printed.out and "has read" in printed.err and "too few to compare models" in printed.err
    assert json.loads((tmp_path / "target" / "exits.json").read_text())["measured"]["text"]["price_error"] is None


def held_out_kl(run: module.RetrofitRun, held_out: Windows) -> float:
    return sum(exit_.kl for exit_ in measure(run.model, held_out, 6).exits)


def test_least_squares_lower_the_kl_and_training_lowers_it_further(llama, data, tmp_path):
    asked = settings(llama, data, tmp_path / "target")
    config = checked_config(asked, command.source_config(llama))
    tokenizer = source_tokenizer(str(llama))
    run, [text] = command.prepare_run(asked, llama, config, tokenizer)
    held_out = PackedConversations(text.held_out, tokenizer.eos_token_id, run.stream.context)
    untrained = held_out_kl(run, held_out)
    run.fit()
    fitted = held_out_kl(run, held_out)
    run.folder.mkdir(parents=True)
    assert len(list(run.steps())) == TOKENS // 512
    assert held_out_kl(run, held_out) < fitted < untrained


@pytest.mark.parametrize(
    ("kind", "exits_learn"),
    [("llama", "original"), ("llama", "text"), ("qwen3", "original"), ("gguf_file", "original")],
)
def test_with_all_mass_on_the_last_exit_the_model_equals_its_base_bit_for_bit(
    kind, exits_learn, data, tmp_path, request
):
    source: Path = request.getfixturevalue(kind)
    asked = replace(settings(source, data, tmp_path / "target"), exits_learn=exits_learn)
    retrofit(asked)
    original, model = NviumForCausalLM.from_pretrained(source), with_exits(asked)
    assert model.dtype == original.dtype == torch.bfloat16
    assert load_model(asked.source, exits=str(asked.target)).model.config.num_exits == 3
    assert model.config.qk_norm == original.config.qk_norm == (kind != "llama")
    kept = {name: weight for name, weight in model.state_dict().items() if not name.startswith("exits.")}
    assert all(torch.equal(weight, original.state_dict()[name]) for name, weight in kept.items())
    logits_BTEV = exit_logits(model)
    assert torch.equal(logits_BTEV[..., -1, :], exit_logits(original)[..., -1, :])
    assert not torch.equal(logits_BTEV[..., 0, :], logits_BTEV[..., -1, :])
    for exit_ in model.exits[:-1]:
        bias = exit_.get_parameter("router.head.bias").data
        bias[CONTINUE], bias[EXIT] = 1e4, -1e4
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, original(IDS).logits)


def test_the_mean_depth_on_the_training_text_is_the_requested_one(llama, data, tmp_path):
    asked = settings(llama, data, tmp_path / "target")
    retrofit(asked)
    model, tokenizer = with_exits(asked), source_tokenizer(str(llama))
    training = read_text(data, tokenizer, model.config.max_position_embeddings, TOKENS).training
    with torch.no_grad():
        probs = [model(torch.from_numpy(each.tokens[None, :-1])).exit_probs[0] for each in training]
    depth = mixture.mean_depth(torch.cat(probs).log(), model.config.exit_layers or []).mean()
    assert depth == pytest.approx(asked.depth, abs=0.005)
    assert json.loads((asked.target / "exits.json").read_text())["shift"]


@pytest.mark.parametrize("exits_learn", ["original", "text"])
def test_the_gradients_of_exits_equal_those_over_all_logits(exits_learn, llama, data, tmp_path, monkeypatch):
    monkeypatch.setattr(model_module, "INITIAL_BIAS", 0.0)
    monkeypatch.setattr(module, "CLIP_NORM", torch.inf)
    asked = replace(settings(llama, data, tmp_path), exits_learn=exits_learn)
    config = checked_config(asked, command.source_config(llama))
    run, _ = command.prepare_run(asked, llama, config, source_tokenizer(str(llama)))
    run.step, weights = run.num_steps - 1, run.model.exit_weights()
    num_windows = run.recipe.windows_per_step
    windows = range(run.step * num_windows, run.num_steps * num_windows)
    losses = [loss_over_all_logits(run, window, exits_learn) for window in windows]
    expected = torch.autograd.grad(torch.stack(losses).mean(), weights)
    taken = list[Tensor | None]()
    monkeypatch.setattr(run.optimizers[0], "step", lambda: taken.extend(weight.grad for weight in weights))
    run.train_step(run.batches_of(run.step))
    for found, gradient in zip(taken, expected, strict=True):
        torch.testing.assert_close(found, gradient, rtol=0.05, atol=0.01 * gradient.abs().max().item())


def loss_over_all_logits(run: module.RetrofitRun, window: int, exits_learn: ExitTarget) -> Tensor:
    """Compute the exits' loss on one window from all logits."""
    rows = run.model.rows(run.stream.batch(window, 1))
    kl_RE, _, log_p_RE = run.model.losses(rows)
    kl = kl_RE.sum(1).mean()
    if exits_learn == "original":
        return kl
    outputs = [exit_.adapter(x_RD) for exit_, x_RD in zip(run.model.early, rows.early, strict=True)]
    logits_REV = torch.stack([*outputs, rows.last_RD], 1) @ run.model.head.float().T
    log_mix_RV = mixture.log_mixture(log_p_RE.detach(), logits_REV)
    return module.TEXT_KL_WEIGHT * kl - log_mix_RV.gather(1, rows.target_R[:, None]).mean()


def test_without_a_text_a_chat_model_generates_its_training_conversations(nvium, monkeypatch, chatty, data, tmp_path):
    both = RetrofitSettings(source=str(chatty), target=tmp_path / "both", data=data, self_talk=1_000, tokens=TOKENS)
    assert command.retrofit(both, source_tokenizer(str(chatty))).keys() == {"text", "conversations"}
    monkeypatch.setenv("COLUMNS", "120")
    printed = nvium("retrofit", chatty, tmp_path / "alone", "--exits", "1,3", "--tokens", 3000)
    assert "of 1,000 tokens" in printed.out + printed.err
    assert json.loads((tmp_path / "alone/exits.json").read_text())["measured"].keys() == {"conversations"}


def test_a_model_without_a_chat_template_needs_a_text(llama, tmp_path):
    with pytest.raises(DataError, match="without a chat template cannot generate conversations; pass --data"):
        retrofit(RetrofitSettings(source=str(llama), target=tmp_path / "target", tokens=300))


@pytest.mark.parametrize("exits_learn", ["original", "text"])
def test_a_resumed_retrofit_equals_an_uninterrupted_one(exits_learn, llama, data, tmp_path, monkeypatch):
    asked = replace(settings(llama, data, tmp_path, TOKENS // 2), exits_learn=exits_learn)
    whole, parts = (replace(asked, target=tmp_path / name) for name in ("whole", "parts"))
    retrofit(whole)
    steps = module.RetrofitRun.train_step

    def interrupted(run: module.RetrofitRun, batches: list[Batch]) -> Report:
        if run.step == 7:
            run.save()
            raise KeyboardInterrupt
        return steps(run, batches)

    monkeypatch.setattr(module.RetrofitRun, "train_step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        retrofit(parts)
    assert with_exits(parts).config.num_exits == 3  # exits of an unfinished retrofit load
    monkeypatch.setattr(module.RetrofitRun, "train_step", steps)
    retrofit(parts)
    one, other = (with_exits(each).state_dict() for each in (whole, parts))
    assert all(torch.equal(one[name], other[name]) for name in one)
    check_only_the_same_retrofit_resumes(parts, llama, monkeypatch)


def check_only_the_same_retrofit_resumes(asked: RetrofitSettings, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = source_tokenizer(str(llama))
    run, _ = command.prepare_run(asked, llama, checked_config(asked, command.source_config(llama)), tokenizer)
    for name in ("text", "base", "tokens", "exits_learn"):
        other = run.description() | {name: "another"}
        with monkeypatch.context() as changed:
            changed.setattr(run, "description", lambda other=other: other)
            with pytest.raises(TrainingError, match=f"belongs to a run with another {name};"):
                run.resume()
    run.resume()
    assert run.step == run.num_steps


def test_a_folder_with_other_files_is_refused_before_a_text_that_is_too_short(llama, tmp_path):
    (text := tmp_path / "short.txt").write_text("too short")
    with pytest.raises(TrainingError, match="not empty, and has no retrofit to resume"):
        retrofit(settings(llama, text, tmp_path))
    with pytest.raises(ValueError, match="too few"):
        retrofit(settings(llama, text, tmp_path / "target"))


LLAMA = NviumConfig(num_hidden_layers=30, hidden_size=64, num_attention_heads=4, adapter_hidden_size=0)


def changed_settings(**more: Any) -> RetrofitSettings:
    return RetrofitSettings(**{"source": "llama", "target": Path("target"), "data": Path(__file__)} | more)


@pytest.mark.parametrize(
    ("exits", "layers"), [("4", [8, 15, 22, 30]), ("2", [15, 30]), ("12,18,24", [12, 18, 24, 30]), ("12,30", [12, 30])]
)
def test_exits_are_evenly_spaced_or_at_the_given_layers(exits, layers):
    added = checked_config(changed_settings(exits=exits), LLAMA)
    assert added.exit_layers == layers
    assert added.adapter_hidden_size == 128
    assert added.default_sampling == "original"


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"exits": "20,"}, "must be a number, or layers such as 12,18,24"),
        ({"exits": "1"}, r"number of exits must be in \[2, 30\], got 1"),
        ({"exits": "31"}, r"number of exits must be in \[2, 30\], got 31"),
        ({"exits": "20,10"}, r"must be in \[1, 30\] and increase, got 20,10"),
        ({"exits": "12,40"}, r"must be in \[1, 30\] and increase, got 12,40"),
        ({"exits": "0,12"}, r"must be in \[1, 30\] and increase, got 0,12"),
        ({"depth": 0.2}, r"depth must be in \(0\.267, 1\), above the depth of the first exit, got 0\.2"),
        ({"depth": 1.0}, "depth must be in"),
        ({"data": Path("nowhere")}, "nowhere: no such file"),
        ({"data": None, "exits_learn": "text"}, "exits_learn=text requires a text"),
    ],
)
def test_invalid_settings_are_refused(wrong, reason):
    with pytest.raises(TrainingError, match=reason):
        checked_config(changed_settings(**wrong), LLAMA)


def test_only_a_plain_llama_can_be_retrofitted():
    with pytest.raises(TrainingError, match="already has exits or an adapter"):
        checked_config(changed_settings(), NviumConfig(num_hidden_layers=2, exit_layers=[1, 2]))
    with pytest.raises(TrainingError, match="llama: is a looped model, which cannot be retrofitted"):
        checked_config(changed_settings(), NviumConfig(num_hidden_layers=2, num_loops=2, adapter_hidden_size=0))
    with pytest.raises(TrainingError, match=r"llama: limits its logits \(final_logit_softcapping\)"):
        checked_config(changed_settings(), NviumConfig(num_hidden_layers=2, logit_cap=30.0, adapter_hidden_size=0))
