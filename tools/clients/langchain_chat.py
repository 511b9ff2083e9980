"""langchain-openai and langchain-anthropic: responses, structured output, tools."""

import sys

from langchain_anthropic import ChatAnthropic
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class Sum(BaseModel):
    """What the sum is."""

    text: str


@tool
def add(a: float, b: float) -> str:
    """Add two numbers."""
    return f"{a + b:g}"


def talk(model):
    bound = model.bind_tools([add])
    history = [("user", "What is 1 + 2?")]
    while (answer := bound.invoke(history)).tool_calls:
        history += [answer, *(add.invoke(call) for call in answer.tool_calls)]
    return answer.text


kind, _, method = sys.argv[1].partition(".")
options = {"use_responses_api": kind == "responses"}
model = ChatAnthropic(model="policy") if kind == "ChatAnthropic" else ChatOpenAI(model="policy", **options)
typed = method and model.with_structured_output(Sum, method=method)
print(typed.invoke("What is 1 + 2?").text if typed else talk(model))
