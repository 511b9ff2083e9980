"""Loads the tools that `rollout.tools` and `rollout.tool_args` name."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Mapping, Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

from asyncrl.errors import ConfigError
from asyncrl.registry import bind_options, load_object, make_by_factory
from asyncrl.tools.base import Tool, tool, tools
from asyncrl.tools.process import find_tool_source

Arguments = Mapping[str, Any]


def load_tools(specs: Sequence[str], tool_args: Mapping[str, Arguments] | None = None) -> dict[str, Tool]:
    """Load tools, by the names for the model, in the order of `specs`. ConfigError names the spec."""
    arguments_by_spec = tool_args or {}
    if unused_specs := sorted(arguments_by_spec.keys() - set(specs)):
        raise ConfigError(
            f"rollout.tool_args: rollout.tools does not list {', '.join(unused_specs)}; add each missing tool"
        )

    loaded_tools: dict[str, Tool] = {}
    origins: dict[str, str] = {}

    for spec in specs:
        for spec_tool in load_spec(spec, arguments_by_spec.get(spec, {})):
            if spec_tool.name in loaded_tools:
                raise ConfigError(
                    f"rollout.tools: {origins[spec_tool.name]!r} and {spec!r} both define a tool "
                    f"{spec_tool.name!r}; remove or rename one of the two (with @tool(name=...), or by "
                    "renaming the method)"
                )

            if spec_tool.process:
                find_tool_source(spec_tool)  # raises if no process could import the tool
            loaded_tools[spec_tool.name] = spec_tool
            origins[spec_tool.name] = spec

    return loaded_tools


def load_tool(spec: str, **arguments: Any) -> Tool:
    spec_tools = load_spec(spec, arguments)
    if len(spec_tools) != 1:
        raise ConfigError(f"tool {spec!r} defines {len(spec_tools)} tools, not one; use load_tools")
    return spec_tools[0]


def load_spec(spec: str, arguments: Arguments) -> tuple[Tool, ...]:
    """Load the tools of one spec: a registered name, the name of an entry point, `module:attribute`,
    `file.py:attribute`, a file or a folder. The attribute may be a class, or a function with annotations,
    without @tool. A suffix after `@` only distinguishes two uses of one factory. `arguments` go to a factory
    (a function annotated `-> Tool` or `-> Sequence[Tool]`)."""
    if Path(spec).is_dir() or (spec.endswith(".py") and Path(spec).is_file()):
        _refuse_arguments(spec, arguments)
        return _load_folder(Path(spec))

    tool_label = f"tool {spec!r}"
    loaded_object: Any = tools.load(re.sub(r"@[\w-]+$", "", spec))
    if decorated_tools := _decorated_tools(loaded_object):
        _refuse_arguments(spec, arguments)
        return decorated_tools

    is_class = inspect.isclass(loaded_object)
    return_annotation = inspect.Signature.empty
    if callable(loaded_object) and not is_class:
        return_annotation = inspect.signature(loaded_object).return_annotation
    if not is_class and return_annotation is inspect.Signature.empty:
        raise ConfigError(
            f"{spec!r} is not a tool; decorate it with @asyncrl.tools.tool, or annotate its return type"
        )

    if is_class or not re.search(r"\bTool\b", str(return_annotation)):
        _refuse_arguments(spec, arguments)
        return _decorated_tools(make_by_factory(partial(tool, loaded_object), tool_label))

    parameters = inspect.signature(loaded_object).parameters.values()
    if positional_names := [
        parameter.name for parameter in parameters if parameter.kind is not parameter.KEYWORD_ONLY
    ]:
        raise ConfigError(
            f"{tool_label}: parameter {positional_names[0]!r} of the factory must come after a `*`"
        )

    factory_result = make_by_factory(bind_options(loaded_object, arguments, tool_label), tool_label)

    # A single tool remembers the factory, for samples with constructor arguments.
    if isinstance(factory_result, Tool):
        return (dataclasses.replace(factory_result, remake=partial(loaded_object, **arguments)),)

    if not isinstance(factory_result, Sequence) or not all(
        isinstance(member, Tool) for member in factory_result
    ):
        raise ConfigError(
            f"{tool_label}: the factory returned {type(factory_result).__name__}, not a Tool or a sequence "
            "of Tools"
        )

    return tuple(factory_result)


def _load_folder(folder: Path) -> tuple[Tool, ...]:
    """Load every Tool in a Python file or in the files of a folder, by file and then by name."""
    tools_by_identity: dict[int, Tool] = {}
    for file in sorted(folder.glob("*.py")) if folder.is_dir() else [folder]:
        module_names: dict[str, Any] = load_object(f"{file}:__dict__", "tool")
        for _, module_object in sorted(module_names.items(), key=itemgetter(0)):
            for decorated_tool in _decorated_tools(module_object):
                tools_by_identity[id(decorated_tool)] = decorated_tool

    if not tools_by_identity:
        raise ConfigError(f"{folder} contains no tools; decorate a function with @tool")
    return tuple(tools_by_identity.values())


def _decorated_tools(decorated: Any) -> tuple[Tool, ...]:
    """Return the tools that `@tool` made of a function or a class; () for any other object."""
    members = decorated if isinstance(decorated, tuple) else (decorated,)
    return members if all(isinstance(member, Tool) for member in members) else ()


def _refuse_arguments(spec: str, arguments: Arguments) -> None:
    if arguments:
        raise ConfigError(f"tool {spec!r} takes no arguments; remove {', '.join(sorted(arguments))}")
