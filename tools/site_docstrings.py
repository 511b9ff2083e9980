"""Griffe extension of the documentation site: shows the arguments in our docstrings as a list.

A docstring describes arguments as `name: text` or `name, name: text`, with further lines indented. Google's
style, which mkdocstrings reads, would take such a line for the title of a box.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

ARGUMENT = re.compile(r"^([a-z_]+(?:, [a-z_]+)*): (.+(?:\n {4}.+)*)$", re.MULTILINE)


def list_arguments(docstring: str) -> str:
    """Return the docstring with a list item of Markdown for each line that describes arguments."""

    def list_item(match: re.Match[str]) -> str:
        names, text = match.groups()
        return f"- {', '.join(f'`{name}`' for name in names.split(', '))}: {text}"

    return ARGUMENT.sub(list_item, docstring)


class ListArguments(griffe.Extension):
    """Rewrites each docstring when griffe has read it from a file."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = list_arguments(obj.docstring.value)
