"""Warns about columns and settings in the rows of data that a run ignores."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from asyncrl.config import RunConfig
from asyncrl.data.columns import NAMES
from asyncrl.data.rows import Row

PLAIN = "single_turn_agent"  # verl's agent loops that need nothing, or only tools
WITH_TOOLS = "tool_agent"
DEMONSTRATED = ("messages", "response", "tools")
READ = frozenset({*NAMES, "agent_name", "reward_manager"} - {*DEMONSTRATED})
MODELS = ("reward_model", "classifier", "llm_judge")


class IgnoredSettings:
    """Counts the rows of a source that ask for something, by (what, its name), and collects unread
    columns."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], int] = {}
        self._unread: dict[str, None] = {}

    def see(self, row: Row, demonstration: bool) -> Row:
        """The same row, which was looked at."""
        unread = (name for name, value in row.items() if value is not None and name not in READ)
        self._unread |= {name: None for name in unread if not (demonstration and name in DEMONSTRATED)}
        if demonstration:
            return row
        reward, extra = _object(row.get("reward_model")), _object(row.get("extra_info"))
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
