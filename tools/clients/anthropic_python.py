"""anthropic: messages, streamed and whole, counted, and the runner of tools."""

import sys

from anthropic import Anthropic, beta_tool

ASKED = {"model": "policy", "max_tokens": 256, "messages": [{"role": "user", "content": "What is 1 + 2?"}]}
client = Anthropic()


@beta_tool
def add(a: float, b: float) -> str:
    """Add two numbers."""
    return str(a + b)


def create():
    return client.messages.create(**ASKED).content[0].text


def count_tokens():
    assert client.messages.count_tokens(model="policy", messages=ASKED["messages"]).input_tokens > 0
    return create()


def stream():
    with client.messages.stream(**ASKED) as events:
        return "".join(events.text_stream)


def tools():
    return client.beta.messages.tool_runner(**ASKED, tools=[add]).until_done().content[0].text


print(globals()[sys.argv[1]]())
