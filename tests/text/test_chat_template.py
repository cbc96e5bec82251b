from typing import Any

import pytest
from pydantic import TypeAdapter
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from nvium_core import load_model
from nvium_core.text.chat_template import ChatTemplate, ConversationError
from nvium_core.text.gguf_tokenizer import gguf_tokenizer
from server.schemas.messages import AnyMessage
from tests.byte_model import END_OF_TEXT, token_ids, wrapped_tokenizer
from tests.text.test_gguf_tokenizer import sentence_piece_fields

TEMPLATE = (
    "{% for message in messages %}{{ '<|endoftext|>' + message.role + '|' + message.content | trim + '\n' }}"
    "{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}{{ 'assistant|' }}{% endif %}"
)

Json = dict[str, Any]

MESSAGE = TypeAdapter[Any](AnyMessage)


def template(source: str | None = None) -> ChatTemplate:
    return ChatTemplate(wrapped_tokenizer(source))


def user(text: str) -> Json:
    return {"role": "user", "content": text}


def text_of(ids: list[int]) -> str:
    return bytes(token_id - 1 for token_id in ids).decode()


def test_the_tokenizers_template_renders_the_prompt():
    ids = template(TEMPLATE).token_ids([user(" Hé "), {"role": "assistant", "content": "Ho"}], [])
    assert ids == [0, *token_ids("user|Hé\n"), 0, *token_ids("assistant|Ho\nassistant|")]


@pytest.mark.parametrize("source", [None, TEMPLATE])
def test_special_tokens_in_messages_and_tools_are_text(source):
    tools = [{"function": {"name": "f", END_OF_TEXT: {"description": END_OF_TEXT}}}]
    plain, special = (template(source).token_ids([user(f"a{t}b{t}{t}")], tools) for t in ("<>", END_OF_TEXT))
    assert special.count(0) == plain.count(0) == (source is not None)
    assert text_of([i for i in special if i]).count(END_OF_TEXT) == 5


def test_the_end_of_a_turn_is_the_tokenizers_and_the_templates_token():
    tokenizer = wrapped_tokenizer("{{ messages[0].content + '<|im_end|>' }}")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    end_of_turn = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert ChatTemplate(tokenizer).ends() == ((tokenizer.eos_token_id, end_of_turn), ())
    assert ChatTemplate(tokenizer).ends(ignore_eos=True) == ((), ())
    assert template(TEMPLATE).ends() == ((tokenizer.eos_token_id,), ())


def test_special_tokens_within_special_tokens_are_text_too():
    vocabulary = {character: number for number, character in enumerate("<s>/ab")}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<s>", "s>", "a<s>"])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    wrapped.chat_template = "{{ '<s>' + messages[0].content }}"
    special, *ids = ChatTemplate(wrapped).token_ids([user("a<s><s>s>b")], [])
    assert special == tokenizer.token_to_id("<s>")
    assert "".join("<s>/ab"[token_id] for token_id in ids) == "a<s><s>s>b"


def test_a_templates_own_error_is_reported_and_other_errors_are_not():
    refusing = template("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ConversationError, match="roles must alternate"):
        refusing.token_ids([user("a")], [])
    with pytest.raises(ConversationError) as failed:
        template("{{ messages[0].content + 1 }}").token_ids([user("a")], [])
    assert str(failed.value) == "the model's chat template rejects the messages"


def test_an_error_in_a_template_names_its_file(tmp_path):
    tokenizer = wrapped_tokenizer("{% for")
    tokenizer.name_or_path = str(tmp_path)
    with pytest.raises(ConversationError, match=f"^{tmp_path}: the chat template cannot be parsed"):
        ChatTemplate(tokenizer)
    (tmp_path / "chat_template.jinja").write_text("{% for")
    with pytest.raises(ConversationError, match=rf"^{tmp_path}/chat_template\.jinja: the chat template cannot"):
        ChatTemplate(tokenizer)


HOSTILE = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "numbers": "{% set x = 9 ** (9 ** 9) %}",
    "memory": "{% set x = 'y' * (messages | length * 1200000000) %}",
    "doubling": "{% set s = namespace(x='ab') %}{% for a in range(40) %}{% set s.x = s.x ~ s.x %}{% endfor %}",
    "long text": "{{ 'y' * (messages | length * 30000000) }}",
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_templates_time_memory_and_output_are_limited(kind):
    with pytest.raises(ConversationError, match=r"exceeds 1 s, 256 MB or the maximum length of text"):
        template(HOSTILE[kind]).token_ids([user("a")], [])
    assert template(TEMPLATE + " ").token_ids([user("a")], [], adds_prompt=False)[1:] == token_ids("user|a\n ")


def test_the_plain_template_renders_every_role():
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"at": "é"}'}}
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    conversation = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": "Hello", "name": "Alice"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": parts},
        {"role": "assistant", "refusal": "No."},
        {"role": "user", "content": "Why?"},
    ]
    messages = [MESSAGE.validate_python(message).for_template() for message in conversation]
    assert text_of(template().token_ids(messages, [{"type": "function", "function": {"name": "look"}}])) == (
        'Functions:\n{"name": "look"}\n\n'
        "System:\nBe kind.\n\n"
        "User (Alice):\nHello\n\n"
        'Assistant:\n{"name": "look", "arguments": {"at": "é"}}\n\n'
        "Tool:\na\nb\n\n"
        "Assistant:\nNo.\n\n"
        "User:\nWhy?\n\n"
        "Assistant:\n"
    )


def test_tools_and_calls_are_passed_to_the_tokenizers_template():
    source = "{{ messages[0].tool_calls[0].function.arguments.x }}{{ tools[0].function.name }}"
    source += "{{ messages[1].tool_call_id }}"
    for arguments, seen in (('{"x": 5}', "5"), ("not json", "")):
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
        turns = {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "1", "content": "a"}
        messages = [MESSAGE.validate_python(turn).for_template() for turn in turns]
        tools = [{"type": "function", "function": {"name": "g"}}]
        assert text_of(template(source).token_ids(messages, tools)) == f"{seen}g1"


def test_a_plain_prompt_begins_like_any_text_of_the_model():
    tokenizer = load_model().tokenizer
    tokenizer.chat_template = None
    ids = ChatTemplate(tokenizer).token_ids([user("Tell me a story.")], [])
    assert ids == tokenizer("User:\nTell me a story.\n\nAssistant:\n").input_ids
    assert ids[0] == tokenizer.bos_token_id


def test_tools_and_calls_are_refused_if_the_template_ignores_them():
    made = template("{% for m in messages %}{{ m.role + '|' + (m.content or '') + '\n' }}{% endfor %}")
    tools = [{"type": "function", "function": {"name": "look"}}]
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": {"at": "é"}}}
    asked = {"role": "assistant", "content": None, "tool_calls": [call]}
    for field, messages, shown in (("tools", [user("a")], tools), ("messages", [user("a"), asked], [])):
        with pytest.raises(ConversationError, match="choose another with --chat-template FILE") as refusal:
            made.token_ids(messages, shown)
        assert refusal.value.field == field
    assert text_of(made.token_ids([user("a")], [])) == "user|a\n"


def test_a_special_token_in_a_message_gets_no_extra_space():
    tokenizer = gguf_tokenizer(sentence_piece_fields().get)
    tokenizer.chat_template = "{{ messages[0].content }}"
    assert tokenizer.decode(ChatTemplate(tokenizer).token_ids([user("a <s> b")], [])) == "a <s> b"
