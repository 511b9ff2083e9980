"""The training objective once more, one token at a time, straight from the formulas.

Slow on purpose: no padding, no packing, no shared code with asyncrl.algorithms or asyncrl.trainer.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from asyncrl.config import RunConfig
from asyncrl.wire.messages.trainer import PlannedTrajectory
from tests.fakes.training import Episode

# The options' defaults, written out again.
LOW = 0.5
HIGH = 5.0
CAP_POSITIVE = 5.0
CAP_NEGATIVE = 2.0


def rewards(row: PlannedTrajectory) -> tuple[float, ...]:
    return tuple(member.reward for member in row.siblings)


def advantage(name: str, reward: float, siblings: tuple[float, ...]) -> float:
    n = len(siblings)
    if n == 1:
        return 0.0
    mean = sum(siblings) / n
    if name == "grpo":
        return (reward - mean) / (math.sqrt(sum((r - mean) ** 2 for r in siblings) / (n - 1)) + 1e-6)

    if name == "rloo":
        other_rewards = list(siblings)
        other_rewards.remove(reward)
        return reward - sum(other_rewards) / (n - 1)

    return reward - mean


def token_log_probs(model: Any, episode: Episode) -> list[tuple[Tensor, float, int]]:
    """(log pi, mu, version) of every model token of an episode."""
    row, turns = episode

    ids: list[int] = []
    where: list[tuple[int, float, int]] = []
    for turn in turns:
        ids += turn.context
        for offset, (token, logprob) in enumerate(
            zip(turn.generation.ids, turn.generation.logprobs, strict=True)
        ):
            (version,) = [span.version for span in turn.generation.spans if span.start <= offset < span.end]
            where.append((len(ids), logprob, version))
            ids.append(token)

    table = torch.log_softmax(model(torch.tensor([ids])).logits[0] / row.temperature, dim=-1)
    return [(table[position - 1, ids[position]], mu, version) for position, mu, version in where]


def batch_loss(model: Any, episodes: list[Episode], step: int, config: RunConfig) -> Tensor:
    """L = -Σ w·M·min(rho, C)·A·log pi / D over all episodes."""
    algorithm = config.algorithm

    total = torch.zeros((), dtype=torch.float64)
    denominator = 0.0
    for episode in episodes:
        row, _ = episode
        tokens = token_log_probs(model, episode)
        a = advantage(algorithm.advantage, row.own.reward, rewards(row))
        cap = CAP_NEGATIVE if a < 0 else CAP_POSITIVE

        weight, share = {
            "token_mean": (1.0, len(tokens)),
            "seq_mean_token_mean": (1 / len(tokens), 1),
            "prompt_mean": (1 / row.group_tokens, len(tokens) / row.group_tokens),
        }[algorithm.aggregation]

        denominator += share
        for logp, mu, version in tokens:
            rho = math.exp(logp.item() - mu)
            if step - version > config.buffer.max_staleness:
                continue
            if LOW <= rho <= HIGH:
                total = total - weight * min(rho, cap) * a * logp

    return total / denominator


def gradients(model: Any, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
