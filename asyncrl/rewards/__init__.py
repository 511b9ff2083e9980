"""Rewards of finished episodes."""

from asyncrl.rewards import code, models, reasoning_gym, task_tests  # importing registers their rewards
from asyncrl.rewards.answers import final_number
from asyncrl.rewards.base import RewardError, RewardInput, combine, evaluate, needs_truth, rewards, runs
from asyncrl.rewards.loading import Reward, RewardSource, in_loop, load_rewards
from asyncrl.rewards.shaping import ShapingInput, select_shapings, shapings, sum_of_shapings
