"""What rows in verl's layout ask for beside a prompt and its ground truth, and this run does not do."""

from __future__ import annotations

from typing import Any

from asyncrl.config import RunConfig
from asyncrl.data.rows import Row

PLAIN = "single_turn_agent"  # verl's agent loops that need nothing, or only tools
WITH_TOOLS = "tool_agent"
MODELS = ("reward_model", "classifier", "llm_judge")


class Asked:
    """Collects it over the rows of a source: (what, its name) → how many rows."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], int] = {}

    def see(self, row: Row) -> Row:
        """The same row, which was looked at."""
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
        """A line for each thing that is not there."""
        return [
            f"{count} samples ask for {text}"
            for (what, name), count in self._counts.items()
            if (text := _unmet(config, what, name))
        ]


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
