"""`thinking_budget` ends the reasoning. All other tokens are those that the model draws without it."""

from typing import Any

import pytest

from nvium_core import Engine, EngineConfig, SamplingParams
from nvium_core.text.answer_parsers import CLOSING, ReasoningParser
from nvium_core.text.detokenizer import TokenBytes
from server.generation.reasoning_budget import ReasoningBudget, Tags
from tests.byte_model import NAME, byte_tokenizer, load_byte_model, token_ids
from tests.server.live_server import server_fixture, template_server
from tests.server.raw_client import Json
from tests.server.scripted_answers import answering
from tests.server.test_reasoning import OPENED, QWEN_3

BUDGET = 5
MARKER = token_ids(CLOSING)
ASKED: Json = {"model": NAME, "messages": [{"role": "user", "content": "Hello"}], "seed": 1, "max_tokens": 40}


unopened, opened = (server_fixture(lambda own=own: template_server(own)) for own in (QWEN_3, OPENED))
"""In `opened`, prompts open the reasoning, unless it is turned off."""

TAGS = Tags(TokenBytes(byte_tokenizer()), 257, token_ids("<think>"), MARKER)
WISHES: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"sampling": "mixture", "top_p": 0.9},
    {"sampling": "original", "repetition_penalty": 1.2},
    {"sampling": "threshold", "threshold": 0.5},
    {"logprobs": 2},
]


def test_all_tokens_but_the_marker_are_drawn_as_without_a_budget_alone_and_in_company():
    """Behind the marker they are those of a prompt that ends with the marker. Few pages make the engine preempt."""
    model, prompt = load_byte_model().model, [9, 4, 6]
    budgeted = {
        f"{seed}": SamplingParams(max_tokens=30, ignore_eos=True, seed=seed, constraint=limited(BUDGET), **wish)
        for seed, wish in enumerate(WISHES)
    }
    crowded = Engine(model, EngineConfig(page_size=4, cache_tokens=80))
    for name, params in budgeted.items():
        crowded.add(name, prompt, params)
    together: dict[str, list[int]] = {name: [] for name in budgeted}
    for event in crowded.run():
        together[event.request_id].append(event.token_id)  # type: ignore[union-attr]
    assert crowded.admission.num_preemptions
    for name, params in budgeted.items():
        [alone] = Engine(model).generate([prompt], params)
        wish = {"max_tokens": 30, "ignore_eos": True, "seed": params.seed, **WISHES[int(name)]}
        [free] = Engine(model).generate([prompt], SamplingParams(**wish))
        begun = [*prompt, *free.token_ids[:BUDGET], *MARKER]
        [behind] = Engine(model).generate([begun], SamplingParams(**wish | {"max_tokens": 30 - BUDGET - len(MARKER)}))
        assert together[name] == alone.token_ids == [*begun[len(prompt) :], *behind.token_ids]


def limited(budget: int) -> ReasoningBudget:
    return ReasoningBudget(TAGS, ReasoningParser("thinking"), budget, None)


@pytest.mark.parametrize("asked", [{"thinking_budget": BUDGET}, {"reasoning": {"max_tokens": BUDGET}}])
def test_the_client_receives_reasoning_of_the_budget_and_then_the_answer(opened, asked):
    create = opened.client(strict=False).chat.completions.create
    whole = create(**ASKED, n=2, extra_body=asked)
    for choice in whole.choices:
        ids = choice.model_extra["nvium"]["token_ids"]
        assert ids[BUDGET : BUDGET + len(MARKER)] == MARKER
        assert (len(ids), len(choice.model_extra["nvium"]["exits"])) == (40, 40)
        assert choice.message.content and choice.message.model_extra["reasoning_content"]
    assert whole.usage.completion_tokens == 80
    streamed = ["", ""]
    for chunk in create(**ASKED, n=2, extra_body=asked, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == [choice.message.content for choice in whole.choices]


def test_a_budget_that_is_not_exhausted_changes_nothing(opened):
    free = opened.chat(max_tokens=40).json()["choices"]
    assert opened.chat(max_tokens=40, thinking_budget=40).json()["choices"] == free
    assert opened.chat(max_tokens=40, thinking_budget=-1).json()["choices"] == free
    off: Json = {"max_tokens": 40, "enable_thinking": False}
    assert opened.chat(**off, thinking_budget=0).json()["choices"] == opened.chat(**off).json()["choices"]


def test_reasoning_that_the_model_opens_or_closes_itself_has_one_marker(unopened):
    with answering(unopened.app, "<think>ab</think>yes", "<think>abc........yes"):
        for budget, thought in ((20, "ab"), (3, "abc")):  # the marker replaces the dots
            message = unopened.chat(thinking_budget=budget).json()["choices"][0]["message"]
            assert (message["reasoning_content"], message["content"]) == (thought, "yes")


@pytest.mark.parametrize("budget", [{"thinking_budget": BUDGET}, {}])
def test_a_format_begins_behind_the_reasoning(opened, budget):
    asked: Json = {"structured_outputs": {"regex": "[a-z]{8}"}, "max_tokens": 60, **budget}
    choice = opened.chat(**asked).json()["choices"][0]
    if budget:
        assert choice["finish_reason"] == "stop" and choice["message"]["content"].isalpha()
        assert len(choice["nvium"]["token_ids"]) == BUDGET + len(MARKER) + 8
    else:
        assert choice["finish_reason"] == "length" and choice["message"]["content"] == ""


def test_a_format_allows_the_model_to_open_the_reasoning(unopened):
    asked: Json = {"structured_outputs": {"regex": "[a-z]{8}"}, "thinking_budget": BUDGET}
    opens = {"logit_bias": {f"{token_ids('<')[0]}": 100}}
    message = unopened.chat(**asked, **opens).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"].isalpha()) == ("<" * BUDGET, True)
    assert "reasoning_content" not in unopened.chat(**asked).json()["choices"][0]["message"]
