"""Rewards of finished episodes."""

from asyncrl.rewards import code, models, reasoning_gym  # noqa: F401 - they register themselves
from asyncrl.rewards.answers import final_number
from asyncrl.rewards.base import (
    RewardError,
    RewardFunction,
    RewardInput,
    combine,
    evaluate,
    needs_truth,
    rewards,
    runs,
)
from asyncrl.rewards.loading import Reward, RewardSource, in_loop, load_reward, load_rewards
from asyncrl.rewards.shaping import ShapingInput, select_shapings, shape, shapings

__all__ = [
    "Reward",
    "RewardError",
    "RewardFunction",
    "RewardInput",
    "RewardSource",
    "ShapingInput",
    "combine",
    "evaluate",
    "final_number",
    "in_loop",
    "load_reward",
    "load_rewards",
    "needs_truth",
    "rewards",
    "runs",
    "select_shapings",
    "shape",
    "shapings",
]
