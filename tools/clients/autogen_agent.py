"""AutoGen: an AssistantAgent with a tool, which reflects on what the tool said."""

import asyncio
import sys

from autogen_agentchat.agents import AssistantAgent
from autogen_ext.models.openai import OpenAIChatCompletionClient

INFO = dict.fromkeys(("vision", "json_output", "structured_output"), False)


async def add(a: float, b: float) -> str:
    """Add two numbers."""
    return f"{a + b:g}"


async def main(streamed):
    client = OpenAIChatCompletionClient(
        model="policy", model_info={**INFO, "function_calling": True, "family": "unknown"}
    )
    agent = AssistantAgent(
        "helper", client, tools=[add], reflect_on_tool_use=True, model_client_stream=streamed
    )
    print((await agent.run(task="What is 1 + 2?")).messages[-1].content)


asyncio.run(main(sys.argv[1] == "streamed"))
