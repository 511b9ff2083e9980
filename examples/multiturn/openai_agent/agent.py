"""A typical agent for any OpenAI-compatible model: it does not know about training.

`solve` is called for each episode. As a program, the same agent reads the sample from stdin and finds its
model through environment variables, as the openai package always does.
"""

from __future__ import annotations

import asyncio
import json
import operator
import os
import sys
from typing import Any

from openai import AsyncOpenAI

from asyncrl.gateway import Endpoint
from asyncrl.types import Sample

OPERATIONS = {"plus": operator.add, "minus": operator.sub, "times": operator.mul}
INTEGER = {"type": "integer"}
CLIENT = AsyncOpenAI(api_key="of each episode")  # one for all: making one takes longer than most requests
CALCULATOR: Any = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Do one operation on two integers.",
        "parameters": {
            "type": "object",
            "properties": {"a": INTEGER, "op": {"enum": sorted(OPERATIONS)}, "b": INTEGER},
            "required": ["a", "op", "b"],
        },
    },
}


def calculate(arguments: str) -> str:
    """The reply of the tool, or an error for the model to read."""
    try:
        given = json.loads(arguments)
        return str(OPERATIONS[given["op"]](given["a"], given["b"]))
    except (KeyError, TypeError, ValueError) as error:
        return f"error: {error!r}"


async def answer(client: AsyncOpenAI, model: str, messages: list[Any]) -> int:
    """Let the model call the calculator until it answers. Return the number of calls."""
    for calls in range(16):
        completion = await client.chat.completions.create(model=model, messages=messages, tools=[CALCULATOR])
        message = completion.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return calls
        for call in message.tool_calls:
            content = calculate(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
    return calls


async def solve(sample: Sample, endpoint: Endpoint) -> dict[str, int]:
    """The agent of an episode. Its return value is the `result` that reward functions get."""
    messages = [{"role": message.role, "content": message.content} for message in sample.prompt]
    client = CLIENT.with_options(base_url=endpoint.base_url, api_key=endpoint.api_key)
    return {"calls": await answer(client, endpoint.model, messages)}


if __name__ == "__main__":
    calls = asyncio.run(answer(AsyncOpenAI(), os.environ["OPENAI_MODEL"], json.load(sys.stdin)["prompt"]))
    print(json.dumps({"calls": calls}))
