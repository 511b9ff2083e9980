"""The tools that a sample requests in `extra_info`, in the format of verl's data.

{"tools": ["search"], "tools_kwargs": {"search": {"create_kwargs": {"corpus": "wiki"}}}}
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from asyncrl.tools.base import Tool, ToolError, join_names
from asyncrl.types import Sample

# verl's keys with arguments for other methods than `open`
UNUSED_KEYS = frozenset({"execute_kwargs", "calc_reward_kwargs", "release_kwargs"})
MAX_PROBLEMS = 20


class SampleTools(msgspec.Struct):
    """Holds a sample's request for tools. `tools`: the names; None: all tools. `tools_kwargs`: by name."""

    tools: list[str] | None = None
    tools_kwargs: dict[str, Any] | None = None

    def tool_arguments(self, name: str) -> dict[str, Any]:
        """Return constructor arguments of one tool, without null: Parquet fills missing arguments with
        null."""
        tool_keywords = _read_object((self.tools_kwargs or {}).get(name), f"tools_kwargs.{name}")
        if "create_kwargs" in tool_keywords:
            tool_keywords = _read_object(tool_keywords["create_kwargs"], f"tools_kwargs.{name}.create_kwargs")
            return {key: value for key, value in tool_keywords.items() if value is not None}
        return {
            key: value for key, value in tool_keywords.items() if value is not None and key not in UNUSED_KEYS
        }


def read_sample_tools(sample: Sample) -> SampleTools:
    """Read a sample's request for tools. ToolError: `extra_info` cannot be read."""
    with ToolError.instead_of(ToolError, text=f"sample {sample.row}"):
        return _decode_sample_tools(sample.extra_info_json)


def check_sample_tools(tools: Mapping[str, Tool], extra_infos: Iterable[str]) -> tuple[list[str], list[str]]:
    """Check the tools that samples request. Return the problems, and the arguments that no tool takes: a line
    for each, with the first sample (counted from 0); at most MAX_PROBLEMS."""
    problems: dict[str, int] = {}
    ignored_arguments: dict[str, int] = {}

    for number, text in enumerate(extra_infos):
        if '"tools' not in text:  # most data sets have nothing to decode
            continue

        try:
            sample_tools = _decode_sample_tools(text)
            _check_names(tools, sample_tools)
            for line in _find_unused(tools, sample_tools):
                ignored_arguments.setdefault(line, number)
        except ToolError as problem:
            problems.setdefault(str(problem), number)

        if max(len(problems), len(ignored_arguments)) >= MAX_PROBLEMS:
            break

    return _number_lines(problems), _number_lines(ignored_arguments)


def _number_lines(first_samples: Mapping[str, int]) -> list[str]:
    return [f"sample {number}: {line}" for line, number in first_samples.items()]


def _find_unused(tools: Mapping[str, Tool], sample_tools: SampleTools) -> Iterator[str]:
    """Find arguments that no tool takes: data made for other trainers brings arguments of missing tools."""
    for name, tool_keywords in (sample_tools.tools_kwargs or {}).items():
        if name not in tools:
            if tool_keywords is not None:
                yield f"tools_kwargs contains {name!r}, which is not in rollout.tools"
            continue

        tool = tools[name]
        keywords = sample_tools.tool_arguments(name)
        constructor = (
            getattr(getattr(tool.state, "func", tool.state), "open", None) if tool.state else tool.remake
        )

        for key in keywords.keys() - accepted_arguments(constructor, keywords).keys():
            yield f"tools_kwargs.{name} contains {key!r}, but the tool has no such parameter"
        for key in sorted(key for key in UNUSED_KEYS if tool_keywords and tool_keywords.get(key)):
            yield f"tools_kwargs.{name} contains {key}, but only create_kwargs are used"


def select_tools(tools: Mapping[str, Tool], sample_tools: SampleTools) -> dict[str, Tool]:
    """Return the tools that a sample requests, in the order of `tools`. ToolError: a name is unknown."""
    _check_names(tools, sample_tools)
    selected_names = tools if sample_tools.tools is None else sample_tools.tools
    return {
        name: _rebuild_tool(tool, sample_tools.tool_arguments(name))
        for name, tool in tools.items()
        if name in selected_names
    }


def merged_arguments(tools: Sequence[Tool], sample_tools: SampleTools) -> dict[str, Any]:
    """Merge constructor arguments of tools that share an object. ToolError: the arguments contradict each
    other."""
    merged: dict[str, Any] = {}
    for tool in tools:
        for key, value in sample_tools.tool_arguments(tool.name).items():
            if merged.setdefault(key, value) != value:
                shared_names = join_names(tool.name for tool in tools)
                raise ToolError(
                    f"tools_kwargs set {key!r} to different values for {shared_names}, which share this "
                    "argument"
                )
    return merged


def accepted_arguments(function: Callable[..., Any] | None, keywords: dict[str, Any]) -> dict[str, Any]:
    """Return the keywords for which a function has parameters; data made for other tools may bring more."""
    if function is None or not keywords:
        return {}
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return keywords
    return {key: value for key, value in keywords.items() if key in parameters}


def _check_names(tools: Mapping[str, Tool], sample_tools: SampleTools) -> None:
    if unknown_names := [name for name in sample_tools.tools or () if name not in tools]:
        raise ToolError(
            f"extra_info.tools contains unknown names: {join_names(unknown_names)}; available: "
            f"{join_names(tools)}"
        )


def _read_object(value: Any, field_name: str) -> dict[str, Any]:
    if not isinstance(value, dict | None):
        raise ToolError(f"{field_name} must be an object, not {value!r:.50}")
    return value or {}


def _rebuild_tool(tool: Tool, arguments: dict[str, Any]) -> Tool:
    """Make a tool again with a sample's constructor arguments, if the tool's factory takes the arguments."""
    accepted = {} if tool.state else accepted_arguments(tool.remake, arguments)
    if accepted and tool.process:
        raise ToolError(
            f"tool {tool.name!r} runs in processes that all samples share; remove the tool's tools_kwargs"
        )

    if not accepted or tool.remake is None:
        return tool

    with ToolError.instead_of(Exception, text=f"tool {tool.name!r} rejects its tools_kwargs"):
        rebuilt_tool = tool.remake(**accepted)
    return dataclasses.replace(rebuilt_tool, name=tool.name)


_decoder = msgspec.json.Decoder(SampleTools | None)


def _decode_sample_tools(text: str) -> SampleTools:
    with ToolError.instead_of(msgspec.MsgspecError, text="cannot read extra_info, tools or tools_kwargs"):
        return _decoder.decode(text or "{}") or SampleTools()
