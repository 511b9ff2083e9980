"""`asyncrl tools list | call`: lists tools, or calls a tool once."""

from __future__ import annotations

import argparse
import asyncio
import inspect
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.data.samples import RowLayout, read_question
from asyncrl.data.sources import RowOrigin
from asyncrl.errors import UNDECODABLE, ConfigError
from asyncrl.registry import search_working_directory
from asyncrl.tools.base import Tool, join_names, tools
from asyncrl.tools.loading import load_spec
from asyncrl.tools.schema import outline_parameters, read_docstring
from asyncrl.tools.toolbox import call_tool
from asyncrl.types import ToolCall

SHOWN_OPTIONS = ("timeout", "retries", "concurrency", "rate", "replay", "blocking", "process")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="asyncrl tools",
        description=(
            "list [SPEC...]: show the name, parameters, description and options of each tool. call SPEC "
            "[JSON]: open a tool, call the tool once with these arguments and print the reply. SPEC: a "
            "name, module:attribute, file.py:attribute or folder, as in rollout.tools."
        ),
    )
    parser.add_argument("action", choices=("list", "call"))
    parser.add_argument("specs", nargs="*", metavar="SPEC", help="tools to list (default: all)")
    parser.add_argument("--name", default="", help="call: name of the tool, if SPEC contains several tools")
    parser.add_argument(
        "--sample", type=Path, help="call: JSON file with the sample for which to open the tool"
    )
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="option for the factory that creates the tools",
    )
    options = parser.parse_intermixed_args(argv)

    search_working_directory()
    arguments = _arguments(options.option)

    if options.action == "list":
        return list_tools(options.specs, arguments)

    if len(options.specs) not in (1, 2):
        parser.error("call takes a SPEC and a JSON object with the arguments, quoted as one word")
    spec, text = (*options.specs, "{}")[:2]
    return call_once(spec, text, arguments, options.name, options.sample)


def list_tools(specs: Sequence[str], arguments: Mapping[str, Any]) -> int:
    """Print name, parameters, description and options of the tools of `specs`, or of all tools that have a
    name."""
    for spec in specs or tools.all_names():
        try:
            loaded_tools = load_spec(spec, arguments)
        except ConfigError:
            if specs:
                raise
            factory: Any = tools.load(spec)  # Without options, or without a package, its tools cannot be made
            option_texts = ", ".join(map(_format_option, inspect.signature(factory).parameters.values()))
            print(f"{spec}  [creates tools; options: {option_texts}]\n    {read_docstring(factory)[0]}")
            continue

        for tool in loaded_tools:
            body = tool.schema["function"]
            source_text = f"  [{spec}]" if spec != tool.name else ""
            print(f"{tool.name}({outline_parameters(tool.schema)}){source_text}")
            print(f"    {body.get('description') or 'no description'}")

            kind = "one object per episode" if tool.state else "a function"
            option_values = {key: getattr(tool, key) for key in SHOWN_OPTIONS}
            changed_options = "".join(
                f", {key}={value}"
                for key, value in option_values.items()
                if value != Tool.__dataclass_fields__[key].default
            )
            print(f"    {kind}{changed_options}")
    return 0


def call_once(
    spec: str, text: str, options: Mapping[str, Any], name: str = "", sample: Path | None = None
) -> int:
    """Open the tool of `spec` (`name` chooses one of several) for a sample, call the tool once and print the
    reply. Return 1 if the reply is an error."""
    tools_by_name = {tool.name: tool for tool in load_spec(spec, options)}
    if len(tools_by_name) == 1 and not name:
        name = next(iter(tools_by_name))
    if name not in tools_by_name:
        problem = f"has no tool {name!r}" if name else f"contains {len(tools_by_name)} tools"
        raise ConfigError(f"{spec!r} {problem}; choose one with --name: {join_names(tools_by_name)}")

    sample_row = None
    if sample:  # a row of a data set, as tools see the row in training; the prompt may be missing
        with ConfigError.instead_of(
            OSError, *UNDECODABLE, text=f"--sample {sample}: not a JSON object with a sample"
        ):
            columns = msgspec.json.decode(sample.read_bytes(), type=dict[str, Any])
        sample_row = read_question(RowOrigin(str(sample), 0), {"prompt": "?"} | columns, RowLayout())

    reply = asyncio.run(call_tool(tools_by_name[name], ToolCall(name, text), sample=sample_row))
    print(reply.content)
    reward = f", reward {reply.reward:g}" if reply.reward else ""
    print(f"-- {name}: {'error' if reply.error else 'reply'} after {reply.seconds:.3f} s{reward}")
    return 1 if reply.error else 0


def _arguments(pairs: Sequence[str]) -> dict[str, Any]:
    """Parse `key=value` of the command line; values are read as JSON if possible."""
    arguments: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise ConfigError(f"--option {pair!r}: write key=value")
        try:
            arguments[key] = json.loads(value)
        except ValueError:
            arguments[key] = value
    return arguments


def _format_option(parameter: inspect.Parameter) -> str:
    annotation = parameter.annotation
    annotation = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    has_default = parameter.default is not parameter.empty
    return (
        f"{parameter.name}: {annotation}" + f" = {json.dumps(parameter.default, default=repr)}" * has_default
    )
