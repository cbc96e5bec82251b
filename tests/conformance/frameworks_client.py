"""What frameworks make of a server: a tool is called and answered. frameworks_client.py URL MODEL, prints JSON."""

import asyncio
import json
import sys

from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import create_tool_from_function
from haystack.utils import Secret
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.llms.openai_like import OpenAILike
from smolagents import OpenAIServerModel, ToolCallingAgent, tool

QUESTION = "What is the weather in Bern?"

cities: list[str] = []


def weather(city: str) -> str:
    """The weather of a city.

    Args:
        city: Its name.
    """
    cities.append(city)
    return f"rain in {city}"


def haystack(url: str, model: str) -> str:
    options = {"api_base_url": url, "max_retries": 0, "generation_kwargs": {"max_tokens": 60}}
    chat = OpenAIChatGenerator(Secret.from_token("none"), model, streaming_callback=lambda _: None, **options)
    agent = Agent(chat_generator=chat, tools=[create_tool_from_function(weather)])
    return str(agent.run([ChatMessage.from_user(QUESTION)])["last_message"].text)


async def llama_index(url: str, model: str) -> str:
    options = {"api_base": url, "api_key": "none", "max_tokens": 60, "max_retries": 0, "is_chat_model": True}
    chat = OpenAILike(model=model, is_function_calling_model=True, **options)
    return str(await FunctionAgent(llm=chat, tools=[weather]).run(QUESTION))


def smolagents(url: str, model: str) -> str:
    chat = OpenAIServerModel(model, api_base=url, api_key="none", max_tokens=60, client_kwargs={"max_retries": 0})
    return str(ToolCallingAgent(tools=[tool(weather)], model=chat, verbosity_level=0).run(QUESTION))


url, model = sys.argv[1:]
answers = [haystack(url, model), asyncio.run(llama_index(url, model)), smolagents(url, model)]
print(json.dumps({"answers": answers, "cities": cities}))
