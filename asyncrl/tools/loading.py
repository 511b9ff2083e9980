"""Loads the tools that `rollout.tools` and `rollout.tool_args` name."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from asyncrl.errors import ConfigError
from asyncrl.registry import bind, built, load_object
from asyncrl.tools.base import Tool, tools
from asyncrl.tools.process import source_of

Arguments = Mapping[str, Any]


def load_tools(specs: Sequence[str], tool_args: Mapping[str, Arguments] | None = None) -> dict[str, Tool]:
    """Tools by the name that the model calls them by, in the order of `specs`. ConfigError names the spec."""
    given = tool_args or {}
    if unused := sorted(given.keys() - set(specs)):
        raise ConfigError(f"rollout.tool_args names {', '.join(unused)}, not in rollout.tools; add it there")
    found: dict[str, Tool] = {}
    origins: dict[str, str] = {}
    for spec in specs:
        for tool in load_all(spec, given.get(spec, {})):
            if tool.name in found:
                raise ConfigError(
                    f"rollout.tools: {origins[tool.name]!r} and {spec!r} both give a tool {tool.name!r}; "
                    f"leave one out, or rename it: @tool(name=...)"
                )
            if tool.process:
                source_of(tool)  # raises where no process could find it
            found[tool.name], origins[tool.name] = tool, spec
    return found


def load_tool(spec: str, **arguments: Any) -> Tool:
    found = load_all(spec, arguments)
    if len(found) != 1:
        raise ConfigError(f"tool {spec!r} gives {len(found)} tools, not one; use load_tools")
    return found[0]


def load_all(spec: str, arguments: Arguments) -> tuple[Tool, ...]:
    """The tools of one spec: a registered name, an entry point's, `module:attribute`, `file.py:attribute`, a
    file or a folder. What follows an `@` only distinguishes two uses of one factory. `arguments` go to a
    factory (a function annotated `-> Tool` or `-> Sequence[Tool]`)."""
    if Path(spec).is_dir() or (spec.endswith(".py") and Path(spec).is_file()):
        _no_arguments(spec, arguments)
        return _folder(Path(spec))
    found = tools.load(re.sub(r"@[\w-]+$", "", spec))
    if isinstance(found, Tool):
        _no_arguments(spec, arguments)
        return (found,)
    if not callable(found) or not re.search(r"\bTool\b", str(inspect.signature(found).return_annotation)):
        raise ConfigError(f"{spec!r} is no tool; decorate it with @asyncrl.tools.tool")
    return _made(spec, found, arguments)


def _made(spec: str, factory: Callable[..., Any], arguments: Arguments) -> tuple[Tool, ...]:
    """Call a factory. A single tool remembers it, for samples with constructor arguments."""
    where = f"tool {spec!r}"
    parameters = inspect.signature(factory).parameters.values()
    if loose := [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY]:
        raise ConfigError(f"{where}: parameter {loose[0]!r} of the factory must come after a `*`")
    made = built(bind(factory, arguments, where), where)
    if isinstance(made, Tool):
        return (dataclasses.replace(made, remake=partial(factory, **arguments)),)
    if not isinstance(made, Sequence) or not all(isinstance(tool, Tool) for tool in made):
        raise ConfigError(f"{where}: the factory gave {type(made).__name__}, no Tool and no sequence of them")
    return tuple(made)


def _folder(folder: Path) -> tuple[Tool, ...]:
    """Every Tool in a Python file or in those of a folder, by file and then by name."""
    found: dict[int, Tool] = {}
    for file in sorted(folder.glob("*.py")) if folder.is_dir() else [folder]:
        names: dict[str, Any] = load_object(f"{file}:__dict__", "tool")
        for _, tool in sorted(names.items()):
            if isinstance(tool, Tool):
                found[id(tool)] = tool
    if not found:
        raise ConfigError(f"{folder}: nothing in it has a tool; decorate one with @tool")
    return tuple(found.values())


def _no_arguments(spec: str, arguments: Arguments) -> None:
    if arguments:
        raise ConfigError(f"tool {spec!r} takes no arguments; remove {', '.join(sorted(arguments))}")
