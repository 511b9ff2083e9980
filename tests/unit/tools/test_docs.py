"""The example of docs/tools.md is a tool file that works."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

from asyncrl.tools import call_tool, load_tools
from asyncrl.tools.base import Options
from asyncrl.types import ToolCall

PAGE = Path(__file__).resolve().parents[3] / "docs/tools.md"


def test_the_example_loads_and_answers(tmp_path: Path) -> None:
    (tmp_path / "my_tools.py").write_text(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)[0])
    found = load_tools([str(tmp_path)])
    assert sorted(found) == ["notes", "weather"]
    reply = asyncio.run(call_tool(found["notes"], ToolCall("notes", '{"line": "a"}')))
    assert (reply.content, reply.reward) == ("noted", 0.1)


def test_every_option_is_documented() -> None:
    rows = "\n".join(line.split("|")[1] for line in PAGE.read_text().splitlines() if line.startswith("| `"))
    assert not [name for name in Options.__annotations__ if f"`{name}`" not in rows]
