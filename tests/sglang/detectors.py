"""What SGLang's own parsers read: run by SGLang's interpreter.

Standard input: a JSON list of [detector of calls, detector of reasoning, whether the prompt opened a thought,
tools (OpenAI's schemas), text]. Standard output, last line: a list of [reasoning, calls, content], each call
[name, arguments as JSON text].
"""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tools/sglang_cpu"))
os.environ["SGLANG_FORWARD_UNKNOWN_TOOLS"] = "1"

import launch  # noqa: F401 - what SGLang's import needs on a CPU
from sglang.srt.entrypoints.openai.protocol import Tool
from sglang.srt.function_call.function_call_parser import FunctionCallParser
from sglang.srt.parser.reasoning_parser import ReasoningParser

logging.disable(logging.CRITICAL)


def read(detector: str, reasoner: str, opened: bool | None, tools: list[Any], text: str) -> list[Any]:
    """As its server does: the reasoning first, then the calls in what is left."""
    thought = ReasoningParser(reasoner, force_reasoning=opened, tool_call_parser_active=True)
    reasoning, answer = thought.parse_non_stream(text)
    parser = FunctionCallParser.ToolCallParserEnum[detector]()
    if not parser.has_tool_call(answer):
        return [reasoning, [], answer]
    try:
        parsed = parser.detect_and_parse(answer, [Tool.model_validate(tool) for tool in tools])
    except Exception:  # a name that is a number, for example: its server answers with the text
        return [reasoning, [], answer]
    return [reasoning, [[call.name, call.parameters] for call in parsed.calls], parsed.normal_text]


if __name__ == "__main__":
    print(json.dumps([read(*job) for job in json.load(sys.stdin)]))
