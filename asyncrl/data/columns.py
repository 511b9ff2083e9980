"""Renames columns of other layouts to the names that samples are made of (`data.columns`), and warns of
columns and settings that a run ignores."""

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

SAMPLE_PARTS = (
    *("prompt", "ground_truth", "data_source", "ability", "reward_model", "extra_info"),
    *("messages", "response", "tools", "images"),
)
EXTRA_PREFIX = "extra_info."
BINARY_DATA = "binary data that is not UTF-8 text"
TEXT_TYPES = (date, time, timedelta, UUID)  # types that JSON lacks, written as text
MAX_LEVELS = 200  # levels of nesting, so that readers of a sample stay below the recursion limit


def check_columns(columns: Mapping[str, str]) -> None:
    """Check the names in `data.columns`. ConfigError for a name that is no part of a sample."""
    for name in columns:
        if name not in SAMPLE_PARTS and not (name.startswith(EXTRA_PREFIX) and name != EXTRA_PREFIX):
            nearest = difflib.get_close_matches(name, SAMPLE_PARTS, n=1)
            raise ConfigError(
                f"data.columns: {name!r} is not part of a sample"
                + (f" (did you mean {nearest[0]}?)" if nearest else "")
                + f"; the parts are {', '.join(SAMPLE_PARTS)}, {EXTRA_PREFIX}NAME"
            )


def rename_columns(
    where: str, row: Row, columns: Mapping[str, str], optional_parts: tuple[str, ...] = ()
) -> Row:
    """Add to a row its configured columns under the names of a sample's parts. A column may be nested:
    `answer.value`. The columns of `optional_parts` may be missing."""
    renamed_row = dict(row)
    for name, column in columns.items():
        if name in optional_parts and column.partition(".")[0] not in row:
            continue

        value: Any = row
        for part in [column] if column in row else column.split("."):
            if not isinstance(value, dict) or part not in value:
                present_columns = ", ".join(row) or "none"
                raise ConfigError(
                    f"{where}: no {column} column, which data.columns refers to (found: {present_columns})"
                )

            value = value[part]

        if name.startswith(EXTRA_PREFIX):
            extra = as_object(where, "extra_info", renamed_row.get("extra_info") or {})
            renamed_row["extra_info"] = extra | {name.removeprefix(EXTRA_PREFIX): value}
        else:
            renamed_row[name] = value

    return renamed_row


def as_object(where: str, column: str, value: Any) -> dict[str, Any]:
    """Return the object in a nested column, which may be JSON text."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise ConfigError(f"{where}: the {column} column contains text that is not JSON") from None

    if not isinstance(value, dict):
        raise ConfigError(f"{where}: the {column} column must be an object, not {type(value).__name__}")

    return value


def as_json(where: str, column: str, value: Any) -> str:
    """Write a value as JSON. NaN, which pandas writes for missing values, and infinity become null, as JSON
    has neither; dates and times become text."""
    with ConfigError.instead_of(
        TypeError,
        ValueError,
        RecursionError,
        text=f"{where}: the {column} column cannot be written as JSON",
    ):
        text = json.dumps(value, ensure_ascii=False, default=_text_value)

    if text.count("[") + text.count("{") > MAX_LEVELS and is_deeper(json.loads(text), MAX_LEVELS):
        raise ConfigError(
            f"{where}: the {column} column is nested deeper than {MAX_LEVELS} levels; flatten the value"
        )
    if "NaN" in text or "Infinity" in text:
        text = json.dumps(json.loads(text, parse_constant=lambda _: None), ensure_ascii=False)

    return text


def as_text(where: str, column: str, value: Any) -> str:
    """Return a name as text, '' if there is none. Binary data are refused, as the name would read b'…'."""
    if isinstance(value, bytes):
        raise ConfigError(f"{where}: the {column} column contains {BINARY_DATA}; write text")
    return str(value or "")


def _text_value(value: Any) -> str:
    if isinstance(value, TEXT_TYPES):
        return str(value)
    kind = BINARY_DATA if isinstance(value, bytes) else f"a value of type {type(value).__name__}"
    raise TypeError(f"found {kind}; write text, a number, a list or an object")


# -- columns and settings that a run ignores ---------------------------------------------------------


PLAIN_LOOP = "single_turn_agent"  # verl's agent loop that needs nothing
TOOL_LOOP = "tool_agent"  # verl's agent loop that needs tools
DEMONSTRATION_COLUMNS = ("messages", "response", "tools")
READ_COLUMNS = frozenset({*SAMPLE_PARTS, "agent_name", "reward_manager"} - {*DEMONSTRATION_COLUMNS})
MODEL_REWARDS = ("reward_model", "classifier", "llm_judge")


class IgnoredSettings:
    """Counts the rows that request a setting, by (setting, name), and collects unread columns."""

    def __init__(self) -> None:
        self._request_counts: dict[tuple[str, str], int] = {}
        self._unread_columns: dict[str, None] = {}

    def count_row(self, row: Row, demonstration: bool) -> Row:
        """Count the requests and the unread columns of a row, and return the row."""
        unread = (
            encodable(name) for name, value in row.items() if value is not None and name not in READ_COLUMNS
        )
        self._unread_columns |= {
            name: None for name in unread if not (demonstration and name in DEMONSTRATION_COLUMNS)
        }
        if demonstration:
            return row

        reward_model = _dict_or_empty(row.get("reward_model"))
        extra_info = _dict_or_empty(row.get("extra_info"))

        requested = {
            "agent_name": row.get("agent_name"),
            "reward_manager": row.get("reward_manager") or reward_model.get("reward_manager"),
            "style": reward_model.get("style"),
            "interaction": _dict_or_empty(extra_info.get("interaction_kwargs")).get("name"),
        }
        for setting, name in requested.items():
            if isinstance(name, str) and name:
                self._request_counts[setting, name] = self._request_counts.get((setting, name), 0) + 1

        return row

    def unmet_requests(self, config: RunConfig) -> list[str]:
        """Return a line for each request that the run does not meet, and a line for unread columns."""
        lines = [
            f"{count} {'sample requests' if count == 1 else 'samples request'} {text}"
            for (setting, name), count in self._request_counts.items()
            if (text := _unmet_request(config, setting, name))
        ]

        unread_names: list[str] = []
        for name in self._unread_columns:
            if all(name not in (column, column.partition(".")[0]) for column in config.data.columns.values()):
                nearest = difflib.get_close_matches(name, READ_COLUMNS, n=1, cutoff=0.8)
                unread_names.append(f"{name} (did you mean {nearest[0]}?)" if nearest else name)

        if unread_names:
            advice = (
                "to pass a column to tools, environments and rewards, set "
                "'data.columns={extra_info.NAME: COLUMN}'"
            )
            lines.append(f"unused columns: {', '.join(unread_names)}; {advice}")

        return lines


def _unmet_request(config: RunConfig, setting: str, name: str) -> str:
    rollout = config.rollout
    rewards = [rollout.reward] if isinstance(rollout.reward, str) else list(rollout.reward)
    has_model_reward = any(reward in MODEL_REWARDS or ":" in reward for reward in rewards)
    has_leader = bool(rollout.agent or rollout.environment)

    if setting == "reward_manager":
        return (
            f"the reward_manager {name!r}, but asyncrl has no reward managers; implement the manager's "
            "behaviour as rollout.reward"
        )

    if setting == "style" and name == "model" and not has_model_reward:
        return (
            f"a reward model (reward_model.style), but rollout.reward is {', '.join(rewards)}; set "
            "rollout.reward to reward_model, classifier or llm_judge (docs/guides/rewards.md)"
        )

    if setting == "interaction" and not has_leader:
        return (
            f"the interaction {name!r} (extra_info.interaction_kwargs), but the run has no environment; set "
            "rollout.environment"
        )

    loop_is_possible = {PLAIN_LOOP: True, TOOL_LOOP: has_leader or bool(rollout.tools)}
    if setting == "agent_name" and not loop_is_possible.get(name, has_leader):
        key = "rollout.tools" if name == TOOL_LOOP else "rollout.agent or rollout.environment"
        return f"the agent loop {name!r} (agent_name), which the run does not have; set {key}"

    return ""


def _dict_or_empty(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
