"""Write docs/configuration.md from asyncrl/config/: the string under a field is its documentation. And the
tables of docs/from_verl.md from configs/from_verl.yaml, of docs/metrics.md from asyncrl/observe/metrics.yaml.

python tools/make_config_docs.py [--check]
"""

from __future__ import annotations

import argparse
import ast
import inspect
import sys
import types
import typing
from pathlib import Path
from typing import Any

import msgspec

from asyncrl import config
from asyncrl.config import RunConfig
from asyncrl.config.base import PATH_MARK
from asyncrl.config.composition import verl_rows
from asyncrl.observe.metrics import sections

DOCS = Path(__file__).resolve().parents[1] / "docs"
TARGET = DOCS / "configuration.md"
VERL = DOCS / "from_verl.md"
METRICS = DOCS / "metrics.md"
BEGIN = "<!-- from {}, by `make docs` -->\n\n"
END = "\n<!-- until here -->"
HEAD = """\
# Configuration

Generated from `asyncrl/config/` by `make docs`; do not edit. Set a key with `key=value` on the command
line, for example `asyncrl train buffer.max_staleness=2`, or in a file of a group in `configs/`. An unknown
key or a value out of bounds ends the command with exit code 2 before any process starts.

A path or a text needs no quotes but those of the shell (`data.train=数据/a=b.jsonl`, `name=20261128`), and
`~` at the beginning of a path is the home directory. Within the brackets of a list or a mapping, quote texts
that have other characters than letters, digits and `/._-+*`: `"data.train=['~/a=b.jsonl', more.jsonl]"`.
"""
BOUNDS = {"ge": "≥ {}", "gt": "> {}", "le": "≤ {}", "lt": "< {}"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if the file is not up to date")
    texts = {TARGET: render(), VERL: render_verl(VERL.read_text())}
    texts[METRICS] = render_metrics(METRICS.read_text())
    outdated = {path: text for path, text in texts.items() if not path.exists() or path.read_text() != text}
    check = parser.parse_args().check

    for path, text in outdated.items():
        if check:
            print(f"{path} is out of date; run `make docs`", file=sys.stderr)
        else:
            path.write_text(text)

    return int(check and bool(outdated))


def render_verl(text: str) -> str:
    """Return docs/from_verl.md with a new table."""
    rows = ["| verl | asyncrl | notes |", "|---|---|---|"]
    for keys, our_keys, note in verl_rows():
        names = ", ".join(f"`{key}`" for key in keys.split(", "))
        rows.append(f"| {names} | {f'`{our_keys}`' if our_keys else '–'} | {note} |".replace("|  |", "| |"))
    return _placed(text, "configs/from_verl.yaml", rows)


def render_metrics(text: str) -> str:
    """Return docs/metrics.md with new tables."""
    lines = []
    for title, metrics in sections().items():
        lines += [f"## {title}", "", "| name | verl | meaning |", "|---|---|---|"]
        for metric in metrics:
            names = metric.names.replace(", ", "`, `")
            meaning = metric.meaning.replace("|", "\\|")
            lines.append(f"| `{names}` | {metric.verl or '–'} | {meaning} |")
        lines.append("")

    return _placed(text, "asyncrl/observe/metrics.yaml", lines[:-1])


def _placed(text: str, source: str, lines: list[str]) -> str:
    """Return the text with these lines between the comments that name their source."""
    begin = BEGIN.format(source)
    before, _, remainder = text.partition(begin)
    _, _, after = remainder.partition(END)
    return f"{before}{begin}" + "\n".join(lines) + f"\n{END}{after}"


def render() -> str:
    """The whole document."""
    sections = [("The run", RunConfig, "")]
    for field in msgspec.structs.fields(RunConfig):
        if _is_section(field.type):
            sections.append((f"`{field.name}`", field.type, f"{field.name}."))
        for kind in filter(_is_section, typing.get_args(field.type)):  # of a mapping
            sections.append((f"`{field.name}.NAME`", kind, f"{field.name}.NAME."))

    count = sum(len(_plain_fields(kind)) for _, kind, _ in sections)
    parts = [HEAD, f"{count} keys.\n", *(_section(*section) for section in sections)]
    return "\n".join(parts)


def _section(title: str, kind: type[msgspec.Struct], prefix: str) -> str:
    docs = field_docs(kind)
    hints = typing.get_type_hints(kind, include_extras=True)
    rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for field in _plain_fields(kind):
        cells = (f"`{prefix}{field.name}`", type_text(hints[field.name]), _default(field), docs[field.name])
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return f"## {title}\n\n{inspect.getdoc(kind)}\n\n" + "\n".join(rows) + "\n"


def field_docs(kind: type) -> dict[str, str]:
    """The string literal after each annotated field. KeyError later on for a field that has none."""
    (definition,) = ast.parse(inspect.getsource(kind)).body
    assert isinstance(definition, ast.ClassDef)

    docs = {}
    for field, after in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(after, ast.Expr):
            assert isinstance(field.target, ast.Name) and isinstance(after.value, ast.Constant)
            docs[field.target.id] = " ".join(str(after.value.value).split())

    return docs


def type_text(hint: Any) -> str:
    """Write a type with its bounds as a person does: `int ≥ 1`, `"mask" | "hold"`, `list of str`."""
    origin = typing.get_origin(hint)
    arguments = typing.get_args(hint)
    if origin is typing.Annotated:
        if arguments[1] == PATH_MARK:
            return type_text(arguments[0])
        meta = arguments[1]
        bounds = [text.format(getattr(meta, name)) for name, text in BOUNDS.items() if _set(meta, name)]
        if _set(meta, "min_length"):
            bounds.append("not empty")
        return f"{type_text(arguments[0])} {', '.join(bounds)}"

    if origin is typing.Literal:
        return " | ".join(f"`{value}`" for value in arguments)
    if origin in (typing.Union, types.UnionType):
        return " | ".join("null" if part is type(None) else type_text(part) for part in arguments)
    if origin is list:
        return f"list of {type_text(arguments[0])}"
    if origin is tuple:
        return f"[{', '.join(map(type_text, arguments))}]"
    if origin is dict:
        return f"mapping of {'sections' if _is_section(arguments[1]) else type_text(arguments[1])}"

    return hint.__name__


def _plain_fields(kind: type[msgspec.Struct]) -> list[msgspec.structs.FieldInfo]:
    return [field for field in msgspec.structs.fields(kind) if not _is_section(field.type)]


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, config.Section)


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.required:
        return "required"
    value = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    return f"`{msgspec.json.encode(value).decode()}`"


def _set(meta: msgspec.Meta, name: str) -> bool:
    return getattr(meta, name) is not None


if __name__ == "__main__":
    sys.exit(main())
