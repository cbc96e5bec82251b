"""The chat template of models tuned here: every turn is a document of its own that begins with its role.

    <|endoftext|>User:
    Tell me a story.<|endoftext|>Assistant:
    Once upon a time …<|endoftext|>

End-of-text is the one special token that such a tokenizer has, and no text of a user's can contain it: so nobody can
fake a turn, a turn ends as a document does, and no text that a model was pretrained on looks like this.
Roles, names, functions and calls are worded as in the plain template for models without one (docs/chat.md).
"""

from transformers import PreTrainedTokenizerBase

CHAT_TEMPLATE = """\
{%- if tools %}
    {{- bos_token + 'Functions:' }}
    {%- for tool in tools %}
        {{- '\\n' + tool.function | tojson }}
    {%- endfor %}
{%- endif %}
{%- for message in messages %}
    {{- bos_token + message.role | capitalize + (' (' + message.name + ')' if message.name else '') + ':' }}
    {%- if message.content %}
        {{- '\\n' + message.content | trim }}
    {%- endif %}
    {%- for call in message.tool_calls or [] %}
        {{- '\\n' + call.function | tojson }}
    {%- endfor %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- bos_token + 'Assistant:\\n' }}
{%- endif %}
"""


def give_chat_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Set the template above, unless the tokenizer has one. Its begin-of-text and end-of-text must be the same
    token."""
    if tokenizer.chat_template:
        return
    if tokenizer.bos_token is None or tokenizer.bos_token != tokenizer.eos_token:
        raise ValueError(
            "a tokenizer whose texts do not begin with their end-of-text token needs its own chat template"
        )
    tokenizer.chat_template = CHAT_TEMPLATE
