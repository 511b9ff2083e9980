"""AG2: an Agent with a tool, by chat completions and by responses."""

import asyncio
import os
import sys

from ag2 import Agent, tool
from ag2.config import OpenAIConfig, OpenAIResponsesConfig


@tool
async def add(a: float, b: float) -> str:
    """Add two numbers."""
    return f"{a + b:g}"


async def main(kind):
    endpoint = {"base_url": os.environ["OPENAI_BASE_URL"], "api_key": os.environ["OPENAI_API_KEY"]}
    config = OpenAIResponsesConfig if kind == "responses" else OpenAIConfig
    agent = Agent("helper", prompt="You help.", config=config(model="policy", **endpoint), tools=[add])
    print((await agent.ask("What is 1 + 2?")).body)


asyncio.run(main(sys.argv[1]))
