"""Tools that the model calls during an episode."""

from asyncrl.tools.base import Rewarded, Tool, ToolError, tool, tools
from asyncrl.tools.calculator import calculator
from asyncrl.tools.loading import load_tool, load_tools
from asyncrl.tools.sample_tools import check_sample_tools
from asyncrl.tools.schema import signature_of
from asyncrl.tools.toolbox import Toolbox, ToolSession, call_tool, unknown_tool
