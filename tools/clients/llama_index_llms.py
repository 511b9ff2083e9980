"""LlamaIndex: OpenAILike with its default, completions, and as a chat model; FunctionAgent."""

import asyncio
import os
import sys

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike


def add(a: float, b: float) -> str:
    """Add two numbers."""
    return f"{a + b:g}"


def llm(**options):
    endpoint = {"api_base": os.environ["OPENAI_BASE_URL"], "api_key": os.environ["OPENAI_API_KEY"]}
    return OpenAILike(model="policy", **endpoint, **options)


async def agent():
    agent_ = FunctionAgent(tools=[add], llm=llm(is_chat_model=True, is_function_calling_model=True))
    return await agent_.run("What is 1 + 2?")


question = ChatMessage(role="user", content="What is 1 + 2?")
match sys.argv[1]:
    case "default":
        print(llm().chat([question]).message.content)
    case "default streamed":
        print(list(llm().stream_complete("What is 1 + 2?"))[-1].text)
    case "chat":
        print(llm(is_chat_model=True).chat([question]).message.content)
    case "FunctionAgent":
        print(asyncio.run(agent()))
