"""Columns of rows: those of other layouts under the names that samples are made of (`data.columns`), and a
warning about columns and settings that a run ignores."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from datetime import date, time, timedelta
from typing import Any
from uuid import UUID

from asyncrl.config import RunConfig
from asyncrl.data.rows import Row
from asyncrl.errors import ConfigError
from asyncrl.values import encodable, is_deeper

NAMES = (
    *("prompt", "ground_truth", "data_source", "ability", "reward_model", "extra_info"),
    *("messages", "response", "tools"),
)
EXTRA = "extra_info."
BINARY = "binary data that are not UTF-8 text"
TEXTUAL = (date, time, timedelta, UUID)  # JSON has none of these: their text stands for them
MAX_LEVELS = 200  # of nesting: readers of a sample must not exceed the recursion limit either


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
    """Return a nested column, or the same as JSON text."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise ConfigError(f"{where}: column {column} is text, but not JSON") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: column {column} must be an object, not {type(value).__name__}")
    return value


def as_json(where: str, column: str, value: Any) -> str:
    """NaN, which pandas writes where a value is missing, and infinity are null: JSON has neither. Dates and
    times are text."""
    with ConfigError.instead_of(
        TypeError,
        ValueError,
        RecursionError,
        text=f"{where}: column {column} cannot be written as JSON",
    ):
        text = json.dumps(value, ensure_ascii=False, default=_dated)
    if text.count("[") + text.count("{") > MAX_LEVELS and is_deeper(json.loads(text), MAX_LEVELS):
        raise ConfigError(f"{where}: {column} is nested deeper than {MAX_LEVELS} levels; flatten it")
    if "NaN" in text or "Infinity" in text:
        text = json.dumps(json.loads(text, parse_constant=lambda _: None), ensure_ascii=False)
    return text


def as_text(where: str, column: str, value: Any) -> str:
    """Return a value that names something, '' of none. Only text can: of binary data a name would be b'…'."""
    if isinstance(value, bytes):
        raise ConfigError(f"{where}: column {column} holds {BINARY}; write text")
    return str(value or "")


def _dated(value: Any) -> str:
    if isinstance(value, TEXTUAL):
        return str(value)
    kind = BINARY if isinstance(value, bytes) else f"a value of type {type(value).__name__}"
    raise TypeError(f"it holds {kind}; write text, a number, a list or an object")


# -- what a run ignores ------------------------------------------------------------------------------


PLAIN = "single_turn_agent"  # verl's agent loops that need nothing, or only tools
WITH_TOOLS = "tool_agent"
DEMONSTRATED = ("messages", "response", "tools")
READ = frozenset({*NAMES, "agent_name", "reward_manager"} - {*DEMONSTRATED})
MODELS = ("reward_model", "classifier", "llm_judge")


class IgnoredSettings:
    """Counts the rows that ask for something, by (what, its name), and collects unread columns."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], int] = {}
        self._unread: dict[str, None] = {}

    def see(self, row: Row, demonstration: bool) -> Row:
        """The same row, which was looked at."""
        unread = (encodable(name) for name, value in row.items() if value is not None and name not in READ)
        self._unread |= {name: None for name in unread if not (demonstration and name in DEMONSTRATED)}
        if demonstration:
            return row
        reward = _object(row.get("reward_model"))
        extra = _object(row.get("extra_info"))
        asked = {
            "agent_name": row.get("agent_name"),
            "reward_manager": row.get("reward_manager") or reward.get("reward_manager"),
            "style": reward.get("style"),
            "interaction": _object(extra.get("interaction_kwargs")).get("name"),
        }
        for what, name in asked.items():
            if isinstance(name, str) and name:
                self._counts[what, name] = self._counts.get((what, name), 0) + 1
        return row

    def unmet(self, config: RunConfig) -> list[str]:
        """A line for each thing that is not there, and one for the columns that nothing reads."""
        lines = [
            f"{count} samples ask for {text}"
            for (what, name), count in self._counts.items()
            if (text := _unmet(config, what, name))
        ]
        return lines + _unread(self._unread, config.data.columns)


def _unread(columns: Mapping[str, None], given: Mapping[str, str]) -> list[str]:
    named = {part for column in given.values() for part in (column, column.partition(".")[0])}
    near = {name: difflib.get_close_matches(name, READ, n=1, cutoff=0.8) for name in columns}
    found = [
        f"{name} (meant {near[name][0]}?)" if near[name] else name for name in columns if name not in named
    ]
    advice = "one that tools, environments or rewards need: 'data.columns={extra_info.NAME: COLUMN}'"
    return [f"nothing reads the columns {', '.join(found)}; {advice}"] if found else []


def _unmet(config: RunConfig, what: str, name: str) -> str:
    rollout = config.rollout
    rewards = [rollout.reward] if isinstance(rollout.reward, str) else list(rollout.reward)
    led = bool(rollout.agent or rollout.environment)
    if what == "reward_manager":
        return f"the reward_manager {name!r}, and there are none; write what it does as rollout.reward"
    if what == "style" and name == "model" and not any(r in MODELS or ":" in r for r in rewards):
        return (
            f"a reward model (reward_model.style), and rollout.reward is {', '.join(rewards)}; set it to "
            "reward_model, classifier or llm_judge, see docs/rewards.md"
        )
    if what == "interaction" and not led:
        return f"the interaction {name!r} (extra_info.interaction_kwargs); set rollout.environment"
    needs = {PLAIN: True, WITH_TOOLS: led or bool(rollout.tools)}
    if what == "agent_name" and not needs.get(name, led):
        key = "rollout.tools" if name == WITH_TOOLS else "rollout.agent or rollout.environment"
        return f"the agent loop {name!r} (agent_name), and nothing leads their episodes; set {key}"
    return ""


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
