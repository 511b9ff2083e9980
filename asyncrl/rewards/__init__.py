"""Rewards of finished episodes."""

from asyncrl.rewards.base import RewardFunction, final_number, load_reward, rewards, score
from asyncrl.rewards.shaping import ShapingInput, select_shapings, shape, shapings

__all__ = [
    "RewardFunction",
    "ShapingInput",
    "final_number",
    "load_reward",
    "rewards",
    "score",
    "select_shapings",
    "shape",
    "shapings",
]
