"""What litellm gets from a server, as JSON. litellm_client.py URL MODEL"""

import json
import os
import sys
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # or it asks the network for prices when imported

import litellm


def usage(answer: Any) -> list[int]:
    return [answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens]


def failure(messages: dict[str, Any]) -> list[object]:
    try:
        litellm.completion(**messages)
    except (litellm.NotFoundError, litellm.BadRequestError) as error:
        return [type(error).__name__, error.status_code]
    return []


url, model = sys.argv[1:]
options: dict[str, Any] = {"api_base": url, "api_key": "none", "max_tokens": 12, "seed": 1, "num_retries": 0}
prompt = {"model": f"text-completion-openai/{model}", "prompt": "Once upon a time", **options}
messages = {"model": f"openai/{model}", "messages": [{"role": "user", "content": "Tell me of a fox."}], **options}
streamed = {"stream": True, "stream_options": {"include_usage": True}}
completion, chat = litellm.text_completion(**prompt), litellm.completion(**messages)
completion_chunks = list(litellm.text_completion(**prompt, **streamed))
chat_chunks = list(litellm.completion(**messages, **streamed))
got = {
    "completion": completion.choices[0].text,
    "completion_usage": usage(completion),
    "completion_stream": "".join(c.choices[0].text or "" for c in completion_chunks if c.choices),
    "chat": chat.choices[0].message.content,
    "chat_usage": usage(chat),
    "chat_finish": chat.choices[0].finish_reason,
    "chat_stream": "".join(c.choices[0].delta.content or "" for c in chat_chunks if c.choices),
    "chat_stream_usage": next(usage(c) for c in reversed(chat_chunks) if getattr(c, "usage", None)),
    "error": failure(messages | {"model": "openai/nobody"}),
    "refused": failure(messages | {"temperature": -1}),
}
print(json.dumps(got))
