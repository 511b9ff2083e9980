"""Columns of other layouts under the names that samples are made of (`data.columns`)."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from typing import Any

from asyncrl.data.rows import Row
from asyncrl.errors import ConfigError

NAMES = (
    *("prompt", "ground_truth", "data_source", "ability", "reward_model", "extra_info"),
    *("messages", "response", "tools"),
)
EXTRA = "extra_info."


def check_columns(columns: Mapping[str, str]) -> None:
    """ConfigError for a name that no sample has."""
    for name in columns:
        if name not in NAMES and not (name.startswith(EXTRA) and name != EXTRA):
            near = difflib.get_close_matches(name, NAMES, n=1)
            raise ConfigError(
                f"data.columns: {name!r} is no part of a sample; "
                + (f"did you mean {near[0]}? " if near else "")
                + f"these are: {', '.join(NAMES)}, {EXTRA}NAME"
            )


def renamed(where: str, row: Row, columns: Mapping[str, str], unread: tuple[str, ...] = ()) -> Row:
    """The row with its columns under their new names, beside those that have the right ones. A column may lie
    within another: `answer.value`. Those of `unread` parts may be missing."""
    found = dict(row)
    for name, column in columns.items():
        if name in unread and column.partition(".")[0] not in row:
            continue
        value = _value(where, row, column)
        if name.startswith(EXTRA):
            extra = as_object(where, "extra_info", found.get("extra_info") or {})
            found["extra_info"] = extra | {name.removeprefix(EXTRA): value}
        else:
            found[name] = value
    return found


def _value(where: str, row: Row, column: str) -> Any:
    if column in row:
        return row[column]
    value: Any = row
    for part in column.split("."):
        if not isinstance(value, dict) or part not in value:
            raise ConfigError(
                f"{where}: no column {column}, which data.columns names (found: {', '.join(row) or 'none'})"
            )
        value = value[part]
    return value


def as_object(where: str, column: str, value: Any) -> dict[str, Any]:
    """A nested column, or the same as JSON text."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            raise ConfigError(f"{where}: column {column} is text, but not JSON") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: column {column} must be an object, not {type(value).__name__}")
    return value


def as_json(where: str, column: str, value: Any) -> str:
    """NaN, which pandas writes where a value is missing, and infinity are null: JSON has neither."""
    try:
        text = json.dumps(value, ensure_ascii=False, default=str)
    except ValueError as error:
        raise ConfigError(f"{where}: {column} cannot be written as JSON ({error})") from None
    if "NaN" in text or "Infinity" in text:
        text = json.dumps(json.loads(text, parse_constant=lambda _: None), ensure_ascii=False)
    return text
