"""What agents make of a server: a tool is called and answered. agents_client.py URL MODEL, prints JSON."""

import asyncio
import json
import sys

from agents import Agent as OpenAIAgent
from agents import ModelSettings, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from inspect_ai.model import GenerateConfig, get_model
from inspect_ai.tool import Tool
from inspect_ai.tool import tool as inspect_tool
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from llm.default_plugins.openai_models import Chat
from openai import AsyncOpenAI
from pydantic_ai import Agent as PydanticAgent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

QUESTION = "What is the weather in Bern?"

cities: list[str] = []


def weather(city: str) -> str:
    """The weather of a city."""
    cities.append(city)
    return f"rain in {city}"


def openai_agents(url: str, model: str) -> str:
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=url, api_key="none", max_retries=0)
    asked = {"model": OpenAIResponsesModel(model, client), "model_settings": ModelSettings(max_tokens=60)}
    agent = OpenAIAgent(name="a", instructions="Answer.", tools=[function_tool(weather)], **asked)
    return str(asyncio.run(Runner.run(agent, QUESTION)).final_output)


def pydantic_ai(url: str, model: str) -> str:
    chat = OpenAIChatModel(model, provider=OpenAIProvider(base_url=url, api_key="none"))
    agent = PydanticAgent(chat, tools=[weather], model_settings={"max_tokens": 60})
    return str(agent.run_sync(QUESTION).output)


def langchain(url: str, model: str) -> str:
    told = tool(weather)
    chat = ChatOpenAI(base_url=url, api_key="none", model=model, max_tokens=60, max_retries=0).bind_tools([told])
    messages = [HumanMessage(QUESTION)]
    while (answer := chat.invoke(messages)).tool_calls:
        results = [ToolMessage(told.invoke(call["args"]), tool_call_id=call["id"]) for call in answer.tool_calls]
        messages = [*messages, answer, *results]
    return str(answer.content)


def llm(url: str, model: str) -> str:
    chat = Chat(model, api_base=url, can_stream=True, supports_tools=True)
    return str(chat.chain(QUESTION, tools=[weather], key="none", options={"max_tokens": 60}).text())


def inspect(url: str, model: str) -> str:
    @inspect_tool(name="weather")
    def told() -> Tool:
        async def execute(city: str) -> str:
            """The weather of a city.

            Args:
                city: Its name.
            """
            return weather(city)

        return execute

    config = GenerateConfig(max_tokens=60, max_retries=0)
    asked = get_model(f"openai-api/nvium/{model}", base_url=url, api_key="none", config=config)
    return asyncio.run(asked.generate_loop(QUESTION, tools=[told()]))[1].completion


LOOPS = (openai_agents, pydantic_ai, langchain, llm, inspect)

answers = {agent.__name__: agent(*sys.argv[1:]) for agent in LOOPS}
print(json.dumps({"answers": answers, "cities": cities}))
