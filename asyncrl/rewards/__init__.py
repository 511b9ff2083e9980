"""Rewards of finished episodes."""

from asyncrl.rewards.base import RewardFunction, final_number, load_reward, rewards, score

__all__ = ["RewardFunction", "final_number", "load_reward", "rewards", "score"]
