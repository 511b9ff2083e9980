"""The tools that a sample asks for in `extra_info`, in the format of verl's data.

{"tools": ["search"], "tools_kwargs": {"search": {"create_kwargs": {"corpus": "wiki"}}}}
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from asyncrl.tools.base import Tool, ToolError, names
from asyncrl.types import Sample

ELSEWHERE = frozenset({"execute_kwargs", "calc_reward_kwargs", "release_kwargs"})  # verl's, not for `open`
MAX_PROBLEMS = 20


class SampleTools(msgspec.Struct):
    """`tools`: the names of those it is given; None: all."""

    tools: list[str] | None = None
    tools_kwargs: dict[str, Any] | None = None

    def arguments(self, name: str) -> dict[str, Any]:
        """Constructor arguments of one tool. Parquet fills what other samples have with null: left out."""
        given = _object((self.tools_kwargs or {}).get(name), f"tools_kwargs.{name}")
        if "create_kwargs" in given:
            given = _object(given["create_kwargs"], f"tools_kwargs.{name}.create_kwargs")
            return {key: value for key, value in given.items() if value is not None}
        return {key: value for key, value in given.items() if value is not None and key not in ELSEWHERE}


def read_sample_tools(sample: Sample) -> SampleTools:
    """ToolError when `extra_info` cannot be read."""
    with ToolError.instead_of(ToolError, text=f"sample {sample.row}"):
        return _decode(sample.extra_info)


def check_sample_tools(tools: Mapping[str, Tool], extra_infos: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return what is wrong with the tools that samples ask for, and which of their arguments nothing takes: a
    line for each, with its first sample (counted from 0); at most MAX_PROBLEMS. Empty: all is well."""
    found: dict[str, int] = {}
    ignored: dict[str, int] = {}
    for number, text in enumerate(extra_infos):
        if '"tools' not in text:  # as in most data sets: nothing to decode
            continue
        try:
            asked = _decode(text)
            _check_names(tools, asked)
            for line in _unused(tools, asked):
                ignored.setdefault(line, number)
        except ToolError as problem:
            found.setdefault(str(problem), number)
        if max(len(found), len(ignored)) >= MAX_PROBLEMS:
            break
    return _numbered(found), _numbered(ignored)


def _numbered(found: Mapping[str, int]) -> list[str]:
    return [f"sample {number}: {line}" for line, number in found.items()]


def _unused(tools: Mapping[str, Tool], asked: SampleTools) -> Iterator[str]:
    """Data that was made for other trainers brings arguments of tools that are not here."""
    for name, given in (asked.tools_kwargs or {}).items():
        if name not in tools:
            if given is not None:
                yield f"tools_kwargs for {name!r}, which is not in rollout.tools"
            continue
        tool = tools[name]
        keywords = asked.arguments(name)
        made_by = (
            getattr(getattr(tool.state, "func", tool.state), "open", None) if tool.state else tool.remake
        )
        for key in keywords.keys() - accepted_arguments(made_by, keywords).keys():
            yield f"tools_kwargs.{name} has {key!r}, for which the tool has no parameter"
        for key in sorted(key for key in ELSEWHERE if given and given.get(key)):
            yield f"tools_kwargs.{name} has {key}; only create_kwargs are used"


def select_tools(tools: Mapping[str, Tool], asked: SampleTools) -> dict[str, Tool]:
    """Return the tools that a sample asks for, in the order of `tools`. ToolError for unknown names."""
    _check_names(tools, asked)
    keep = tools if asked.tools is None else asked.tools
    return {name: _remade(tool, asked.arguments(name)) for name, tool in tools.items() if name in keep}


def merged_arguments(tools: Sequence[Tool], asked: SampleTools) -> dict[str, Any]:
    """Constructor arguments of tools that share an object. ToolError where they contradict each other."""
    given: dict[str, Any] = {}
    for tool in tools:
        for key, value in asked.arguments(tool.name).items():
            if given.setdefault(key, value) != value:
                shared = names(tool.name for tool in tools)
                raise ToolError(f"tools_kwargs give {key!r} of {shared}, which share it, different values")
    return given


def accepted_arguments(function: Callable[..., Any] | None, given: dict[str, Any]) -> dict[str, Any]:
    """Keep the keywords that a function has parameters for; data made for other tools may bring more."""
    if function is None or not given:
        return {}
    parameters = inspect.signature(function).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return given
    return {key: value for key, value in given.items() if key in parameters}


def _check_names(tools: Mapping[str, Tool], asked: SampleTools) -> None:
    if unknown := [name for name in asked.tools or () if name not in tools]:
        raise ToolError(f"extra_info.tools has unknown names: {names(unknown)}; there are: {names(tools)}")


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict | None):
        raise ToolError(f"{where} must be an object, not {value!r:.50}")
    return value or {}


def _remade(tool: Tool, arguments: dict[str, Any]) -> Tool:
    """Make a tool again with a sample's constructor arguments, where it is a factory's that takes them."""
    given = {} if tool.state else accepted_arguments(tool.remake, arguments)
    if given and tool.process:
        raise ToolError(f"tool {tool.name!r} runs in processes that all samples share: give no tools_kwargs")
    if not given or tool.remake is None:
        return tool
    with ToolError.instead_of(Exception, text=f"tool {tool.name!r} refuses its tools_kwargs"):
        made = tool.remake(**given)
    return dataclasses.replace(made, name=tool.name)


_decoder = msgspec.json.Decoder(SampleTools | None)


def _decode(text: str) -> SampleTools:
    with ToolError.instead_of(msgspec.MsgspecError, text="extra_info, tools or tools_kwargs"):
        return _decoder.decode(text or "{}") or SampleTools()
