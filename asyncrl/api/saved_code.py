"""Names functions and classes of the caller so that other processes can load them; nothing is pickled.

    of a module or file    module:NAME or FILE.py:NAME    the processes import it
    of a notebook's cell   task.py:NAME                   a file with its source, and with all that it names

The file of a cell holds, in an order in which it can run: imports, constants whose value can be written down,
functions and classes of the notebook. Any other object that the code names is refused by name.
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
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asyncrl.api.saved_rows import digest_of, save_once
from asyncrl.errors import ConfigError
from asyncrl.tools.base import Tool

SAVED_FILE = "task.py"
MAIN_MODULES = ("__main__", "__mp_main__")  # the second: in processes that multiprocessing has spawned
MODULE_NAMES = ("__name__", "__doc__", "__file__", "__spec__", "__builtins__")  # each module has its own
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def loadable_name(subject: Any, key: str, directory: Path) -> tuple[str, Path | None]:
    """Return the name under which processes can load a function, a class or a tool, and its file in
    `directory` if its source was saved there: the name then begins with the file's path from there.
    ConfigError, which begins with `key`, for what no other process could load."""
    if isinstance(subject, functools.partial):
        raise ConfigError(
            f"{key}: a functools.partial cannot be loaded by name; pass {{FUNCTION: {{option: value}}}} "
            "instead"
        )
    definition = _defined_object(subject)
    name = getattr(definition, "__qualname__", "")
    module_name = getattr(definition, "__module__", None)
    if not name or module_name is None or not callable(definition):
        raise ConfigError(f"{key}: unexpected type {type(subject).__name__}; pass a function or a class")
    if name == "<lambda>":
        raise ConfigError(f"{key}: a lambda cannot be loaded by name; write a function with def")
    if "." in name:
        raise ConfigError(
            f"{key}: {name} is defined inside another function or class; define it at the top level"
        )

    module = sys.modules.get(module_name)
    if module is not None and getattr(module, name, None) is not subject:
        raise ConfigError(
            f"{key}: {name} in {module_name} has been replaced or removed; pass the current object, or "
            "rename your own"
        )
    if module_name not in MAIN_MODULES:
        return f"{module_name}:{name}", None
    if (module_spec := getattr(module, "__spec__", None)) is not None:  # python -m
        return f"{module_spec.name}:{name}", None
    if (file := getattr(module, "__file__", None)) and os.path.isfile(file):
        return f"{os.path.abspath(file)}:{name}", None

    source = SavedSource(key, name)
    source.add_definition(name, subject)
    content = source.text().encode()
    digest = digest_of(content)
    return f"{digest}/{SAVED_FILE}:{name}", save_once(directory / digest / SAVED_FILE, content)


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
        imports = sorted(self._imports, key=lambda line: (not line.startswith("from __future__"), line))
        # Of a class that its own names need again the first place is the right one.
        paragraphs = ["\n".join(imports), *dict.fromkeys(self._definitions)]
        return "\n\n\n".join(filter(None, paragraphs)) + "\n"

    def add_definition(self, name: str, subject: Any) -> None:
        """Add the source of a function or class, after that of the names that it uses."""
        definition = _defined_object(subject)
        if getattr(definition, "__closure__", None):
            raise self._refusal(name, "is defined inside another function; define it at the top level")

        cell, namespace = self._find_cell(name, definition)
        nodes = [node for node in ast.parse(cell).body if isinstance(node, Definition) and node.name == name]
        if not nodes:
            raise self._refusal(name, f"is not defined by a top-level def or class {name}; write one")
        node = nodes[-1]
        if definition is not subject and not node.decorator_list:
            raise self._refusal(
                name,
                f"was changed after its definition; put the change in a decorator (@…) above {name} instead",
            )
        first_line = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        source = "\n".join(cell.split("\n")[first_line - 1 : node.end_lineno])

        for used_name in _used_names(source, node, namespace):
            self._add_name(used_name, namespace)
        for part in ast.walk(node):
            if isinstance(part, ast.Attribute):
                self._add_submodule(ast.unparse(part), namespace)
        self._definitions.append(source)

    def _add_submodule(self, dotted_name: str, namespace: dict[str, Any]) -> None:
        """Import a submodule that the code reaches through its package, as after `import xml.dom`."""
        root_name, _, attributes = dotted_name.partition(".")
        package = namespace.get(root_name)
        submodule_name = f"{getattr(package, '__name__', '')}.{attributes}"
        if isinstance(package, types.ModuleType) and submodule_name in sys.modules:
            self._imports[f"import {submodule_name}"] = None

    def _add_name(self, name: str, namespace: dict[str, Any]) -> None:
        is_builtin = name not in namespace and hasattr(builtins, name)
        if name in self._added_names or name in MODULE_NAMES or is_builtin:
            return
        self._added_names.add(name)
        if name not in namespace:
            raise ConfigError(
                f"{self.key}: {self.root} uses {name}, which is not defined (any more); define it"
            )

        value = namespace[name]
        if getattr(value, "__wrapped__", None) is getattr(builtins, name, name):
            return  # IPython's `open`
        if isinstance(value, types.ModuleType):
            suffix = "" if name == value.__name__ else f" as {name}"
            self._imports[f"import {value.__name__}{suffix}"] = None
            return

        if (import_place := _import_place(value, name)) is not None:
            module_name, defined_name = import_place
            alias = "" if defined_name == name else f" as {name}"
            self._imports[f"from {module_name} import {defined_name}{alias}"] = None
        elif (needed_module := _module_of_repr(value)) is not None:
            if needed_module:
                self._imports[f"import {needed_module}"] = None
            self._definitions.append(f"{name} = {value!r}")
        elif isinstance(_defined_object(value), types.FunctionType | type):
            self.add_definition(name, value)
        else:
            raise self._refusal(
                name,
                f"is of type {type(value).__name__}; add it to the rows as a column, read it inside the "
                "function, or put it in a file",
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

        # A class without methods: a cell that defines it. Cells have no time, as files have, and no order.
        cells = {
            "".join(entry[2]) for entry in linecache.cache.values() if len(entry) == 4 and entry[1] is None
        }
        defining_cells = [cell for cell in cells if is_class and defines_class.search(cell)]
        if len(defining_cells) == 1:
            return defining_cells[0], vars(sys.modules["__main__"])
        if defining_cells:
            raise self._refusal(
                name,
                "is a class without methods that several cells define; add a method, or rename the class",
            )

        raise self._refusal(
            name,
            "was typed at a prompt that does not keep the source (Python's own prompt does from 3.13 "
            "on); move it to a file",
        )

    def _refusal(self, name: str, reason: str) -> ConfigError:
        user = self.root if name == self.root else f"{self.root} uses {name}, which"
        return ConfigError(f"{self.key}: {user} {reason}")


def _used_names(source: str, node: Definition, namespace: dict[str, Any]) -> Iterator[str]:
    """Yield the names at top level that the code of a definition uses. Names in annotations, which tools
    evaluate even if Python does not, and names that a class body reads and sets are yielded if the namespace
    has them."""
    top_level = symtable.symtable(source, "<cell>", "exec")
    names: dict[str, None] = {}
    perhaps_names: list[str] = []

    tables = [top_level]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        for symbol in table.get_symbols():
            if symbol.is_global() or (table is top_level and symbol.is_referenced()):
                names[symbol.get_name()] = None
            elif table.get_type() == "class" and symbol.is_referenced() and symbol.is_assigned():
                perhaps_names.append(symbol.get_name())

    annotations: list[ast.expr | None] = []
    for part in ast.walk(node):
        if isinstance(part, ast.arg | ast.AnnAssign):
            annotations.append(part.annotation)
        elif isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
            annotations.append(part.returns)
    for annotation in filter(None, annotations):
        for part in ast.walk(annotation):
            if isinstance(part, ast.Name):
                perhaps_names.append(part.id)
            elif isinstance(part, ast.Constant) and isinstance(part.value, str):  # "Shelf"
                perhaps_names += re.findall(r"[^\W\d]\w*", part.value)

    names |= dict.fromkeys(name for name in perhaps_names if name in namespace)
    names.pop(node.name, None)
    yield from names


def _import_place(value: Any, name: str) -> tuple[str, str] | None:
    """Return the module and the name in it from which a value can be imported; None if it cannot be."""
    owner = getattr(value, "__self__", None)  # `from random import randint` is a method
    module_names = [getattr(value, "__module__", None), type(owner).__module__, "typing"]
    defined_names = [getattr(value, "__qualname__", None), getattr(value, "__name__", None)]
    defined_names += [getattr(value, "_name", None), name]  # the first: of `Any` and `Literal`

    for module_name in module_names:
        if isinstance(module_name, str) and module_name not in (*MAIN_MODULES, "builtins"):
            for defined_name in defined_names:
                if isinstance(defined_name, str) and _member(module_name, defined_name) is value:
                    return module_name, defined_name
    return None


def _member(module_name: str, name: str) -> Any:
    return getattr(sys.modules.get(module_name), name, None)


def _module_of_repr(value: Any) -> str | None:
    """Return the module that reading a value's `repr` needs, '' for none; None if it cannot be read back."""
    needed_module = {"typing": "typing", "re": "re"}.get(type(value).__module__, "")
    try:
        if isinstance(value, types.GenericAlias | types.UnionType):  # list[tuple[str, int]], int | None
            copy = eval(repr(value), {})
        elif needed_module:  # Literal["a", "b"], re.compile("…")
            copy = eval(repr(value), {needed_module: sys.modules[needed_module]})
        else:
            copy = ast.literal_eval(repr(value))
        return needed_module if type(copy) is type(value) and bool(copy == value) else None
    except Exception:  # a repr that is no expression, or a comparison that raises
        return None
