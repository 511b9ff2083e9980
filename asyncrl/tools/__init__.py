"""Tools that the model calls during an episode."""

from asyncrl.tools.base import Replay, Rewarded, Tool, call_tool, load_tool, tool, tools, unknown_tool
from asyncrl.tools.calculator import calculator

__all__ = [
    "Replay",
    "Rewarded",
    "Tool",
    "calculator",
    "call_tool",
    "load_tool",
    "tool",
    "tools",
    "unknown_tool",
]
