"""Names functions and classes of the caller so that other processes can load them; nothing is pickled.

    of a module or file    module:NAME or FILE.py:NAME    the processes import it
    of a notebook's cell   task.py:NAME                   a file with its source, and with all that it names

The file of a cell holds, in an order in which it can run: imports, constants whose value can be written down,
functions and classes of the notebook. What else the code names cannot be saved, and is refused by name.
"""

from __future__ import annotations
import __future__

import ast
import builtins
import functools
import inspect
import linecache
import os
import re
import symtable
import sys
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2s
from pathlib import Path
from typing import Any

from asyncrl.api.saved_rows import DIGEST_BYTES
from asyncrl.errors import ConfigError
from asyncrl.tools.base import Tool

SAVED_FILE = "task.py"
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def loadable_name(subject: Any, key: str, directory: Path) -> tuple[str, Path | None]:
    """Return the name under which processes can load a function, a class or a tool, and its file in
    `directory` if its source was saved there: the name then begins with the file's path from there.
    ConfigError, which begins with `key`, for what no other process could load."""
    if isinstance(subject, functools.partial):
        raise ConfigError(f"{key}: a partial cannot be loaded; give {{FUNCTION: {{option: value}}}} instead")
    definition = _defined_object(subject)
    name = getattr(definition, "__qualname__", "")
    module_name = getattr(definition, "__module__", None)
    if not name or module_name is None or not callable(definition):
        raise ConfigError(f"{key}: is of type {type(subject).__name__}; give a function or a class")
    if name == "<lambda>":
        raise ConfigError(f"{key}: a lambda has no name to load it by; write it as a function, with def")
    if "." in name:
        raise ConfigError(
            f"{key}: {name} is defined inside of another function or class; define it at the top level"
        )

    module = sys.modules.get(module_name)
    if module is not None and getattr(module, name, None) is not subject:
        raise ConfigError(
            f"{key}: {module_name} has another {name} by now, or none; give the one that is there, or give "
            "yours a name of its own"
        )
    if module_name != "__main__":
        return f"{module_name}:{name}", None
    if (module_spec := getattr(module, "__spec__", None)) is not None:  # python -m
        return f"{module_spec.name}:{name}", None
    if (file := getattr(module, "__file__", None)) and os.path.isfile(file):
        return f"{os.path.abspath(file)}:{name}", None

    source = SavedSource(key, name)
    source.add_definition(name, subject)
    content = source.text().encode()
    digest = blake2s(content, digest_size=DIGEST_BYTES).hexdigest()
    path = directory / digest / SAVED_FILE
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    return f"{digest}/{SAVED_FILE}:{name}", path


def _defined_object(subject: Any) -> Any:
    """Return the function or class that a `def` or `class` made, below decorators and tools."""
    while True:
        if is_tool_class(subject):
            subject = subject[0]
        elif isinstance(subject, Tool):
            subject = subject.state or subject.function
        elif hasattr(subject, "__wrapped__"):
            subject = subject.__wrapped__
        else:
            return subject


def is_tool_class(subject: Any) -> bool:
    """Return whether `@tool` has made this tuple of a class, a tool of each method."""
    return isinstance(subject, tuple) and bool(subject) and all(isinstance(part, Tool) for part in subject)


@dataclass
class SavedSource:
    """The source of an object of a notebook, and of all that it names, as it grows. `key` and `root` begin
    the errors."""

    key: str
    root: str
    _imports: dict[str, None] = field(default_factory=dict)
    _definitions: list[str] = field(default_factory=list)
    _added_names: set[str] = field(default_factory=set)

    def text(self) -> str:
        paragraphs = ["\n".join(sorted(self._imports)), *self._definitions]
        return "\n\n\n".join(filter(None, paragraphs)) + "\n"

    def add_definition(self, name: str, subject: Any) -> None:
        """Add the source of a function or class, after that of the names that it uses."""
        definition = _defined_object(subject)
        if getattr(definition, "__closure__", None):
            raise self._refusal(name, "defined inside of another function; define it at the top level")

        cell, namespace = self._find_cell(name, definition)
        nodes = [node for node in ast.parse(cell).body if isinstance(node, Definition) and node.name == name]
        if not nodes:
            raise self._refusal(name, f"made by other code than a def or class {name} at the top level")
        first_line = min([nodes[-1].lineno, *(decorator.lineno for decorator in nodes[-1].decorator_list)])
        source = "\n".join(cell.splitlines()[first_line - 1 : nodes[-1].end_lineno])

        for used_name in _global_names(source, nodes[-1]):
            self._add_name(used_name, namespace)
        for part in ast.walk(nodes[-1]):  # `xml.dom` in code after `import xml.dom`
            if isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name):
                package = namespace.get(part.value.id)
                submodule_name = f"{getattr(package, '__name__', '')}.{part.attr}"
                if isinstance(package, types.ModuleType) and submodule_name in sys.modules:
                    self._imports[f"import {submodule_name}"] = None
        self._definitions.append(source)

    def _add_name(self, name: str, namespace: dict[str, Any]) -> None:
        if name in self._added_names or (name not in namespace and hasattr(builtins, name)):
            return
        self._added_names.add(name)
        if name not in namespace:
            raise ConfigError(f"{self.key}: {self.root} uses {name}, which is not defined (any more)")

        value = namespace[name]
        if isinstance(value, types.ModuleType):
            suffix = "" if name == value.__name__ else f" as {name}"
            self._imports[f"import {value.__name__}{suffix}"] = None
            return

        module_name = getattr(value, "__module__", None)
        defined_name: Any = getattr(value, "__qualname__", getattr(value, "__name__", None))
        is_importable = (
            isinstance(module_name, str)
            and module_name not in ("__main__", "builtins")
            and isinstance(defined_name, str)
            and getattr(sys.modules.get(module_name), defined_name, None) is value
        )
        if is_importable:
            suffix = "" if defined_name == name else f" as {name}"
            self._imports[f"from {module_name} import {defined_name}{suffix}"] = None
        elif (imported_name := _name_in_typing(value)) is not None:
            alias = "" if imported_name == name else f" as {name}"
            self._imports[f"from typing import {imported_name}{alias}"] = None
        elif (needed_module := _module_of_repr(value)) is not None:
            if needed_module:
                self._imports[f"import {needed_module}"] = None
            self._definitions.append(f"{name} = {value!r}")
        elif isinstance(_defined_object(value), types.FunctionType | type):
            self.add_definition(name, value)
        else:
            raise self._refusal(
                name,
                f"of type {type(value).__name__}: make it a column of the rows, read it inside of "
                "the function, or put it in a file",
            )

    def _find_cell(self, name: str, definition: Any) -> tuple[str, dict[str, Any]]:
        """Return the text of the cell that defined a function or class, and the names at its top level."""
        is_class = inspect.isclass(definition)
        defines_class = re.compile(rf"^class {name}\b", re.MULTILINE)

        for member in vars(definition).values() if is_class else [definition]:
            if not isinstance(member, types.FunctionType):
                continue
            cell = "".join(linecache.getlines(member.__code__.co_filename, member.__globals__))
            if defines_class.search(cell) if is_class else cell:  # a decorator's methods are of another file
                if member.__code__.co_flags & __future__.annotations.compiler_flag:
                    self._imports["from __future__ import annotations"] = None
                return cell, member.__globals__

        # A class without methods: the newest cell that defines it. Cells have no time, as files have.
        cells = [
            "".join(entry[2]) for entry in linecache.cache.values() if len(entry) == 4 and entry[1] is None
        ]
        for cell in reversed(cells):
            if is_class and defines_class.search(cell):
                return cell, vars(sys.modules["__main__"])

        raise self._refusal(
            name,
            "of a prompt that keeps no source (Python's own does from 3.13 on); put it in a file",
        )

    def _refusal(self, name: str, reason: str) -> ConfigError:
        user = "is" if name == self.root else f"uses {name},"
        return ConfigError(f"{self.key}: {self.root} {user} {reason}")


def _global_names(source: str, node: Definition) -> Iterator[str]:
    """Yield the names at top level that the code of a definition uses, and those in its annotations, which
    tools evaluate even if Python does not."""
    top_level = symtable.symtable(source, "<cell>", "exec")
    own_names = {node.name}

    def walk(table: symtable.SymbolTable) -> Iterator[str]:
        for symbol in table.get_symbols():
            if symbol.is_global() or (table is top_level and symbol.is_referenced()):
                yield symbol.get_name()
        for child in table.get_children():
            yield from walk(child)

    annotations: list[ast.expr | None] = []
    for part in ast.walk(node):
        if isinstance(part, ast.arg | ast.AnnAssign):
            annotations.append(part.annotation)
        elif isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
            annotations.append(part.returns)
    annotated_names = [
        part.id
        for annotation in filter(None, annotations)
        for part in ast.walk(annotation)
        if isinstance(part, ast.Name)
    ]

    yield from dict.fromkeys(name for name in (*walk(top_level), *annotated_names) if name not in own_names)


def _name_in_typing(value: Any) -> str | None:
    """Return the name of a special form (`Any`, `Literal`), whose module does not say where it is."""
    name = getattr(value, "_name", None) or getattr(value, "__name__", None)
    return name if isinstance(name, str) and getattr(typing, name, None) is value else None


def _module_of_repr(value: Any) -> str | None:
    """Return the module that reading a value's `repr` needs, '' for none; None if it cannot be read back."""
    needed_module = {"typing": "typing", "re": "re"}.get(type(value).__module__, "")
    try:
        if needed_module:  # Literal["a", "b"], re.compile("…")
            copy = eval(repr(value), {needed_module: sys.modules[needed_module]})
        else:
            copy = ast.literal_eval(repr(value))
        return needed_module if type(copy) is type(value) and bool(copy == value) else None
    except Exception:  # a repr that is no expression, or a comparison that raises
        return None
