"""Algorithms that take every way through the learner, and one batch of each."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor

from asyncrl.trainer.world import World
from tests.fakes.training import Episode, difference, full_state, make_learner, run_batch, tiny_config

UNFILTERED = {"filter_zero_variance": False}
RECIPES: dict[str, dict[str, Any]] = {
    "gae": {"algorithm": {"advantage": "gae", "normalise": "none"}, "buffer": UNFILTERED},
    "ppo": {
        "algorithm": {"advantage": "gae", "loss": {"ppo": {"clip_high": 0.28, "dual_clip": 0}}, "epochs": 2},
        "buffer": UNFILTERED,
    },
    "remax": {"algorithm": {"advantage": "remax"}},
    "grpo_turn": {"algorithm": {"advantage": "grpo_turn"}},
    "gdpo": {"algorithm": {"advantage": "gdpo"}, "buffer": UNFILTERED},
    "optimal token baseline": {"algorithm": {"advantage": "optimal_token_baseline"}},
    "gpg": {"algorithm": {"advantage": "gpg"}},
    "m2po": {"algorithm": {"loss": "m2po"}},
    "sft": {
        "algorithm": {"advantage": "constant", "loss": "sft"},
        "buffer": {"episodes_per_group": 1, **UNFILTERED},
    },
    "clip_cov": {"algorithm": {"loss": "clip_cov", "steps_per_batch": 2}},
    "tba": {"algorithm": {"loss": "tba"}, "buffer": UNFILTERED},
    "dro, batch_std": {"algorithm": {"loss": "dro", "normalise": "batch_std"}},
    "gspo": {"algorithm": {"loss": {"gspo": {"clip_low": 0.1, "clip_high": 0.1}}, "epochs": 2}},
    "kl_cov": {"algorithm": {"loss": {"kl_cov": {"share": 0.1}}, "steps_per_batch": 2}},
    "cispo_scalerl, vetoed": {
        "algorithm": {
            "loss": {"cispo_scalerl": {"cap": 2}},
            "correction": {"veto": {"least": 0.4}},
            "aggregation": "token_sum",
        },
    },
    "scalerl": {
        "algorithm": {"loss": "cispo_scalerl", "normalise": "batch_std", "aggregation": "prompt_mean"},
    },
    "kl in loss, entropy, batch_std": {
        "algorithm": {"normalise": "batch_std", "entropy_coef": 0.1},
        "kl": {"where": "loss", "coef": 0.1},
    },
    "js": {"kl": {"where": "loss", "estimator": "js", "coef": 0.9}},
    "reverse, top_k, steps": {
        "algorithm": {"loss": "ppo", "steps_per_batch": 2},
        "kl": {"where": "loss", "estimator": "reverse", "top_k": 3, "coef": 0.9},
    },
    "batch_mean, turns": {"algorithm": {"correction": {"truncate": {"level": "turn"}, "batch_mean": {}}}},
    "gae, kl in reward": {
        "algorithm": {"advantage": "gae", "normalise": "whiten_running"},
        "kl": {"where": "reward", "coef": 0.1},
        "buffer": UNFILTERED,
    },
    "kl in reward, pass_at_k": {
        "algorithm": {"advantage": "pass_at_k"},
        "kl": {"where": "reward"},
        "buffer": UNFILTERED,
    },
    "loglinear": {
        "algorithm": {"loss": {"ppo": {"clip_high": 0.28, "dual_clip": 0}}, "epochs": 2, "prox": "loglinear"}
    },
}

COMPARING = ("gpg", "optimal token baseline", "clip_cov", "tba", "kl in reward, pass_at_k")
"""Recipes that exchange something between ranks, each in another way."""


def trained(
    world: World, path: str, name: str, cut: list[list[list[Episode]]], step: int = 0
) -> dict[str, Tensor]:
    """Weights of policy and critic after one batch by plain gradient descent, in float64; they moved, and
    what is reported is finite."""
    config = tiny_config(path, **copy.deepcopy(RECIPES[name]), trainer={"lr": 0.1})
    learner = make_learner(config, world)
    learner.step = step
    before = full_state(learner.policy)
    learner.optimizer = torch.optim.SGD(learner.policy.parameters(), lr=0.1)
    if learner.critic is not None:
        learner.critic.optimizer = torch.optim.SGD(learner.critic.parameters(), lr=0.1)
    metrics = run_batch(learner, cut)
    assert all(math.isfinite(value) for value in metrics.values()), metrics

    weights = full_state(learner.policy)
    assert difference(weights, before) > 1e-6

    if learner.critic is not None:
        named = learner.critic.named_parameters()
        weights |= {f"critic.{n}": p.detach().full_tensor().clone() for n, p in named}

    return weights
