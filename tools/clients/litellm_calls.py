"""litellm by its providers."""

import os
import sys

import litellm

URL = os.environ["OPENAI_BASE_URL"]
ROOT = os.environ["ANTHROPIC_BASE_URL"]
KEY = os.environ["OPENAI_API_KEY"]
QUESTION = "What is 1 + 2?"
request = {"messages": [{"role": "user", "content": QUESTION}], "api_key": KEY}
PARAMETERS = {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}


def complete(model, api_base, **options):
    """Two turns, with a call of the tool."""
    while True:
        answer = litellm.completion(model=model, api_base=api_base, tools=[TOOL], **request, **options)
        if options:
            answer = litellm.stream_chunk_builder(list(answer))
        message = answer.choices[0].message
        request["messages"].append(message.model_dump(exclude_none=True))

        for call in message.tool_calls or ():
            request["messages"].append({"role": "tool", "tool_call_id": call.id, "content": "3"})
        if not message.tool_calls:
            return message.content


CASES = {
    "openai": lambda: complete("openai/policy", URL),
    "openai streamed": lambda: complete("openai/policy", URL, stream=True),
    "hosted_vllm": lambda: complete("hosted_vllm/policy", URL),
    "litellm_proxy": lambda: complete("litellm_proxy/policy", URL),
    "anthropic": lambda: complete("anthropic/policy", ROOT),
    "anthropic streamed": lambda: complete("anthropic/policy", ROOT, stream=True),
    "text_completion": lambda: (
        litellm.text_completion(
            model="text-completion-openai/policy", prompt=QUESTION, api_base=URL, api_key=KEY
        )
        .choices[0]
        .text
    ),
    "responses": lambda: (
        litellm.responses(model="openai/policy", input=QUESTION, api_base=URL, api_key=KEY)
        .output[0]
        .content[0]
        .text
    ),
}
print(CASES[sys.argv[1]]())
