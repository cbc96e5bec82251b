import subprocess
import sys
from functools import partial

import pytest

from nvium_core import LLM, Engine, InvalidRequest, SamplingParams
from tests.byte_model import load_byte_model

LOADED = load_byte_model(context=128)
PROMPTS = ["Once", "A fox"]


@pytest.fixture
def llm() -> LLM:
    return LLM(LOADED, deterministic=True)


def by_hand(prompt: str, **sampling: object) -> list[int]:
    [completion] = Engine(LOADED.model).generate([LOADED.tokenizer(prompt).input_ids], SamplingParams(**sampling))
    return completion.token_ids


def test_a_text_is_continued_like_its_tokens_by_the_engine(llm):
    completions = llm.generate("Once", max_tokens=12, seed=3)
    assert completions.token_ids == by_hand("Once", max_tokens=12, seed=3)
    assert completions.text == LOADED.tokenizer.decode(completions.token_ids, skip_special_tokens=True).rstrip("\ufffd")
    assert len(completions.exits) == 12
    assert completions.finish_reason == completions[0].finish_reason == "length"


def test_several_texts_are_completed_in_order_and_independently(llm):
    together = llm.generate(PROMPTS, max_tokens=8, seed=5)
    assert [completion.token_ids for completion in together] == [by_hand(p, max_tokens=8, seed=5) for p in PROMPTS]
    with pytest.raises(ValueError, match="too many values"):
        _ = together.text


def test_n_and_best_of_give_the_requested_number_of_choices(llm):
    assert len(llm.generate(PROMPTS, n=3, max_tokens=4, seed=1)) == 6
    first, second = llm.generate("Once", n=2, max_tokens=6, seed=1)
    assert [llm.generate("Once", choice=j, max_tokens=6, seed=1)[0] for j in (0, 1)] == [first, second]
    assert len(llm.generate("Once", n=2, best_of=4, max_tokens=6, seed=1)) == 2


def test_a_stream_is_the_completion_in_pieces(llm):
    pieces = list(llm.stream("Once", max_tokens=30, seed=3))
    whole = llm.generate("Once", max_tokens=30, seed=3)
    assert "".join(piece.text for piece in pieces) == whole.text
    assert [token for piece in pieces for token in piece.token_ids] == whole.token_ids
    assert [exit_ for piece in pieces for exit_ in piece.exits] == whole.exits
    assert [piece.finish_reason for piece in pieces if piece.finish_reason] == ["length"]


def test_open_streams_do_not_disturb_each_other(llm):
    alone = {prompt: list(llm.stream(prompt, max_tokens=20, seed=3)) for prompt in PROMPTS}
    first, second = (llm.stream(prompt, max_tokens=20, seed=3) for prompt in PROMPTS)
    pieces = [next(first), next(first)]
    assert llm.generate("Then", max_tokens=8, seed=5).token_ids == by_hand("Then", max_tokens=8, seed=5)
    assert list(second) == alone[PROMPTS[1]]
    assert pieces + list(first) == alone[PROMPTS[0]]
    assert not llm.engine.has_work


def test_a_stream_that_is_never_read_or_closed_early_leaves_the_engine_idle(llm):
    llm.stream("Once", max_tokens=20)
    stream = llm.stream("Once", max_tokens=20)
    next(stream)
    stream.close()
    assert not llm.engine.has_work
    assert len(llm.generate("Once", max_tokens=3).token_ids) == 3


@pytest.mark.parametrize(
    "call",
    [
        lambda llm: llm.generate([1, 2]),
        lambda llm: llm.generate(None),
        lambda llm: llm.generate("\ud83d"),
        lambda llm: llm.generate("a", stop=[""]),
        lambda llm: llm.generate("a", stop=5),
        lambda llm: llm.chat([{"role": "user", "content": "hi"}], stop_token_ids=None),
        lambda llm: llm.chat([{"role": "user", "content": [{"type": "image_url"}]}]),
        lambda llm: llm.chat([{"role": "user", "content": {}}]),
        lambda _: LLM(LOADED, generation_config="on"),
        lambda _: LLM(device="gpu"),
        lambda llm: llm.chat("hi"),
        lambda llm: llm.chat([{"role": "poet", "content": "hi"}]),
        lambda llm: llm.stream(["a"]),
        lambda llm: llm.generate(PROMPTS, temperature=9),
        lambda llm: llm.generate(PROMPTS, max_tokens=200),
    ],
)
def test_a_wrong_argument_is_an_invalid_request_and_leaves_the_engine_idle(llm, call):
    with pytest.raises(InvalidRequest):
        call(llm)
    assert not llm.engine.has_work


def test_a_stop_string_ends_the_text_before_it_and_after_min_tokens(llm):
    whole = llm.generate("Once", max_tokens=60, seed=3)
    stop = whole.text[10:12]
    at = whole.text.index(stop)
    stopped = llm.generate("Once", max_tokens=60, seed=3, stop=stop)
    assert stopped.text == whole.text[:at]
    assert stopped[0].finish_reason == "stop"
    assert len(stopped.token_ids) < len(whole.token_ids)
    with_stop = llm.generate("Once", max_tokens=60, seed=3, stop=[stop], include_stop_str_in_output=True)
    assert with_stop.text == whole.text[:at] + stop
    later = llm.generate("Once", max_tokens=60, min_tokens=len(stopped.token_ids), seed=3, stop=stop)
    assert len(later.token_ids) > len(stopped.token_ids)
    assert not llm.engine.has_work


def test_the_parts_of_a_message_are_joined_as_by_the_server(llm):
    parts = [{"type": "text", "text": "a"}, {"type": "refusal", "refusal": "b"}]
    answers = [llm.chat([{"role": "user", "content": content}], max_tokens=8, seed=3) for content in (parts, "a\nb")]
    assert answers[0].token_ids == answers[1].token_ids


@pytest.mark.parametrize("name", ["stops", "stop_token_ids"])
def test_ignore_eos_also_continues_after_the_chat_templates_end_of_turn(llm, name):
    ask = partial(llm.chat, [{"role": "user", "content": "hi"}], max_tokens=60, seed=3)
    free = ask(ignore_eos=True)
    setattr(llm._template, name, (free.text[0] if name == "stops" else free.token_ids[0],))
    assert len(ask().token_ids) == 1
    assert ask(ignore_eos=True).token_ids == free.token_ids


def test_a_stop_token_has_no_text_and_flushes_the_buffer(llm):
    token_ids = llm.generate("Once", max_tokens=20, seed=3).token_ids
    before = token_ids[: token_ids.index(token_ids[-1])]
    text = LOADED.tokenizer.decode(before, skip_special_tokens=True).rstrip("\ufffd")
    stop = text[-1:] + "never"
    ended = llm.generate("Once", max_tokens=20, seed=3, stop=stop, stop_token_ids=[token_ids[-1]])
    assert (ended.text, ended[0].finish_reason) == (text, "stop")


AUTO = "from transformers import AutoConfig, AutoModel, AutoModelForCausalLM"
IMPORTS = {
    "nvium_core first": f"import nvium_core; {AUTO}",
    "models first": "import nvium_core; from transformers import AutoModelForCausalLM, AutoModel, AutoConfig",
    "a base class first": f"import nvium_core; from transformers import PreTrainedModel; {AUTO}",
    "transformers first": f"{AUTO}; import nvium_core",
}
LOADS = """
from pathlib import Path
folder = next(Path(nvium_core.__file__).parent.glob("checkpoints/*"))
print(type(AutoConfig.from_pretrained(folder)).__name__)
print(type(AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False)).__name__)
print(type(AutoModel.from_pretrained(folder)).__name__)
"""


@pytest.mark.parametrize("order", IMPORTS)
def test_the_auto_classes_load_the_model_in_any_import_order(order):
    program = [sys.executable, "-c", IMPORTS[order] + LOADS]
    printed = subprocess.run(program, check=True, capture_output=True, text=True).stdout.split()
    assert printed == ["NviumConfig", "NviumForCausalLM", "NviumForCausalLM"]
