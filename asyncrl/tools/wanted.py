"""What a sample says of its tools in `extra_info`, as verl's data does.

{"tools": ["search"], "tools_kwargs": {"search": {"create_kwargs": {"corpus": "wiki"}}}}
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from asyncrl.foreign import line
from asyncrl.tools.base import Tool, ToolError, names
from asyncrl.types import Sample

log = logging.getLogger("asyncrl.tools")


class Wanted(msgspec.Struct):
    """`tools`: the names of those it is given; None: all."""

    tools: list[str] | None = None
    tools_kwargs: dict[str, dict[str, Any] | None] | None = None

    def arguments(self, name: str) -> dict[str, Any]:
        """Constructor arguments of one tool. Parquet fills what other rows have with null: left out."""
        given = (self.tools_kwargs or {}).get(name) or {}
        inner = given.get("create_kwargs", given) or {}
        if not isinstance(inner, dict):
            raise ToolError(f"tools_kwargs.{name}.create_kwargs must be an object, not {inner!r:.50}")
        return {key: value for key, value in inner.items() if value is not None}


def wanted(sample: Sample) -> Wanted:
    """ToolError when it says what cannot be read."""
    try:
        return _decode(sample.extra_info or "{}") or Wanted()
    except msgspec.MsgspecError as problem:
        raise ToolError(f"extra_info of row {sample.row}, tools or tools_kwargs: {line(problem)}") from None


def chosen(tools: Mapping[str, Tool], asked: Wanted) -> dict[str, Tool]:
    """Those that a sample asks for, in the order of `tools`. ToolError for unknown names."""
    named = {*(asked.tools or ()), *(name for name, given in (asked.tools_kwargs or {}).items() if given)}
    if unknown := sorted(named - tools.keys()):
        raise ToolError(f"the sample asks for the tool {unknown[0]!r}; there are: {names(tools)}")
    keep = tools if asked.tools is None else asked.tools
    return {name: _remade(tool, asked.arguments(name)) for name, tool in tools.items() if name in keep}


def accepted(function: Callable[..., Any] | None, given: dict[str, Any]) -> dict[str, Any]:
    """Those keywords that a function has parameters for; data made for other tools may bring more."""
    if function is None or not given:
        return {}
    parameters = inspect.signature(function).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return given
    if left_out := sorted(given.keys() - parameters.keys()):
        log.debug("create_kwargs that nobody asks for: %s", ", ".join(left_out))
    return {key: value for key, value in given.items() if key in parameters}


def _remade(tool: Tool, arguments: dict[str, Any]) -> Tool:
    """With a sample's constructor arguments, where it is a factory's that takes them."""
    given = {} if tool.state else accepted(tool.remake, arguments)
    if given and tool.process:
        raise ToolError(f"tool {tool.name!r} runs in processes that all samples share: give no tools_kwargs")
    if not given or tool.remake is None:
        return tool
    try:
        made = tool.remake(**given)
    except Exception as problem:
        raise ToolError(f"tool {tool.name!r} refuses its tools_kwargs: {line(problem)}") from problem
    return dataclasses.replace(made, name=tool.name)


_decode = msgspec.json.Decoder(Wanted | None).decode
