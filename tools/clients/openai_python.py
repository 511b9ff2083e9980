"""openai: chat completions, streamed and whole, and responses."""

import json
import sys

from openai import OpenAI

PARAMETERS = {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}
QUESTION = [{"role": "user", "content": "What is 1 + 2?"}]
client = OpenAI()
history = list(QUESTION)


def chat(streamed=False):
    request = {"model": "policy", "messages": history, "tools": [TOOL]}
    while True:
        if streamed:
            with client.chat.completions.stream(**request) as events:
                message = events.get_final_completion().choices[0].message
        else:
            message = client.chat.completions.create(**request).choices[0].message

        history.append({"role": "assistant", "content": message.content, "tool_calls": message.tool_calls})
        for call in message.tool_calls or ():
            arguments = json.loads(call.function.arguments)
            reply = str(arguments["a"] + arguments["b"])
            history.append({"role": "tool", "tool_call_id": call.id, "content": reply})

        if not message.tool_calls:
            return message.content


def stream():
    return chat(streamed=True)


def responses():
    tool = {"type": "function", "name": "add", "parameters": PARAMETERS}
    while True:
        answer = client.responses.create(model="policy", input=history, tools=[tool])
        calls = [item for item in answer.output if item.type == "function_call"]
        history.extend(answer.output)
        for call in calls:
            history.append({"type": "function_call_output", "call_id": call.call_id, "output": "3"})
        if not calls:
            return answer.output_text


print(globals()[sys.argv[1]]())
