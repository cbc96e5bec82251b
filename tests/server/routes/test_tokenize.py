from typing import Any

import httpx
from hypothesis import given, settings
from hypothesis import strategies as st

from nvium_core import load_model
from tests.byte_model import END_OF_TEXT, NAME, token_ids
from tests.server.live_server import LiveServer, live_server, template_server


def tokenize(server: LiveServer, **body: Any) -> httpx.Response:
    return server.http.post("/tokenize", json=body)


def detokenize(server: LiveServer, **body: Any) -> httpx.Response:
    return server.http.post("/detokenize", json=body)


@settings(max_examples=50, deadline=None)
@given(text=st.text(max_size=40).filter(lambda text: END_OF_TEXT not in text))
def test_detokenize_inverts_tokenize(server, text):
    ids = token_ids(text)
    assert tokenize(server, prompt=text).json() == {"count": len(ids), "max_model_len": 4096, "tokens": ids}
    assert detokenize(server, tokens=ids).json() == {"prompt": text}


def test_special_tokens_are_added_unless_disabled():
    model = load_model()
    begin = model.tokenizer.bos_token
    with live_server(model) as server:
        for adds, expected in ((True, f"{begin}Once"), (None, f"{begin}Once"), (False, "Once")):
            ids = tokenize(server, prompt="Once", add_special_tokens=adds).json()["tokens"]
            assert detokenize(server, tokens=ids).json() == {"prompt": expected}
            asked = {"model": "default", "add_special_tokens": adds, "max_tokens": 1, "return_token_ids": True}
            assert server.complete(**asked).json()["choices"][0]["prompt_token_ids"] == ids


def test_messages_have_the_tokens_of_a_chats_prompt(server):
    messages = [{"role": "user", "content": f"Hello {END_OF_TEXT}"}]
    for tools in ([], [{"type": "function", "function": {"name": "f"}}]):
        body = {"model": NAME, "messages": messages, "max_tokens": 1, "return_token_ids": True, "tools": tools}
        choice = {"tool_choice": "required"} if tools else {}
        chat = server.http.post("/v1/chat/completions", json=body | choice).json()
        assert tokenize(server, messages=messages, tools=tools).json()["tokens"] == chat["prompt_token_ids"]
    plain = tokenize(server, messages=messages, add_generation_prompt=False).json()["tokens"]
    assert detokenize(server, tokens=plain).json()["prompt"] == f"User:\nHello {END_OF_TEXT}"


def test_tokenize_passes_the_same_options_to_the_template_as_a_chat():
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well"}]
    tools = [{"type": "function", "function": {"name": "f"}}]
    template = (
        "{{ mood }}{{ (tools or [])|map(attribute='function.name')|join }}"
        "{% for m in messages %}{{ m.content }}|{% endfor %}"
        "{% if add_generation_prompt %}>{% endif %}"
    )
    with template_server(template) as server:
        for asked, text in (
            ({}, "Hi|Well|>"),
            ({"add_generation_prompt": False}, "Hi|Well|"),
            ({"continue_final_message": True}, "Hi|Well"),
            ({"continue_final_message": True, "messages": [turns[0], turns[1] | {"content": ""}]}, "Hi|>"),
            ({"chat_template_kwargs": {"mood": "sad"}, "tools": tools}, "sadfHi|Well|>"),
        ):
            tokens = server.http.post("/tokenize", json={"messages": turns, **asked}).json()["tokens"]
            chat = server.chat(**{"messages": turns, "max_tokens": 1, "return_token_ids": True, **asked})
            assert tokens == chat.json()["prompt_token_ids"] == token_ids(text)


def test_a_long_text_is_tokenized(server):
    text = "word " * 300_000
    assert tokenize(server, prompt=text).json()["count"] == len(text)


def test_an_unknown_model_is_not_found_and_unknown_fields_are_named(server):
    assert tokenize(server, model="gpt-x", prompt="a").status_code == 404
    assert detokenize(server, model="gpt-x", tokens=[]).status_code == 404
    assert detokenize(server, model="default", tokens=[]).json() == {"prompt": ""}
    for response in (tokenize(server, prompt="a", more=1), detokenize(server, tokens=[], more=1)):
        assert response.headers["x-nvium-ignored-params"] == "more"
