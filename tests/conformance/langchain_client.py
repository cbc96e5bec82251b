"""What langchain-openai gets from a server, as JSON. langchain_client.py URL MODEL"""

import json
import sys

import openai
from langchain_core.messages import AIMessage
from langchain_core.runnables import Runnable
from langchain_openai import ChatOpenAI, OpenAI


def counts(message: AIMessage) -> list[int]:
    return [message.usage_metadata[f"{kind}_tokens"] for kind in ("input", "output", "total")]


def failure(chat: Runnable) -> list[object]:
    try:
        chat.invoke("Tell me of a fox.")
    except openai.APIStatusError as error:
        return [type(error).__name__, error.status_code, error.code, error.param]
    return []


url, model = sys.argv[1:]
options = {"base_url": url, "api_key": "none", "model": model, "max_tokens": 12, "seed": 1, "max_retries": 0}
text, chat = OpenAI(**options), ChatOpenAI(**options, stream_usage=True)
told = chat.invoke("Tell me of a fox.")
chunks = list(chat.stream("Tell me of a fox."))
got = {
    "completion": text.invoke("Once upon a time"),
    "completion_stream": "".join(text.stream("Once upon a time")),
    "chat": told.content,
    "chat_usage": counts(told),
    "chat_finish": told.response_metadata["finish_reason"],
    "chat_stream": "".join(chunk.content for chunk in chunks),
    "chat_stream_usage": next(counts(chunk) for chunk in chunks if chunk.usage_metadata),
    "error": failure(ChatOpenAI(**options | {"model": "nobody"})),
    "refused": failure(ChatOpenAI(**options, temperature=-1)),
}
print(json.dumps(got))
