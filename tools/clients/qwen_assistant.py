"""Qwen-Agent: an Assistant with a tool, whose calls it writes into and reads from plain text."""

import json
import os

from qwen_agent.agents import Assistant
from qwen_agent.tools.base import BaseTool, register_tool


@register_tool("add")
class Add(BaseTool):
    description = "Add two numbers."
    parameters = [{"name": name, "type": "number", "description": name, "required": True} for name in "ab"]

    def call(self, params, **kwargs):
        arguments = json.loads(params)
        return str(arguments["a"] + arguments["b"])


endpoint = {"model": "policy", "model_type": "oai", "model_server": os.environ["OPENAI_BASE_URL"]}
llm = {**endpoint, "api_key": os.environ["OPENAI_API_KEY"]}
*_, messages = Assistant(llm=llm, function_list=["add"]).run([{"role": "user", "content": "What is 1 + 2?"}])
print(messages[-1]["content"])
